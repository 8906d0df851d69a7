"""Arguments of `tomadiff bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import add_offload_argument, add_trust_argument, finite
from .names import ARCHITECTURES, DTYPES, EMBEDDED, METHODS, OURS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="sdxl",
        help=f"full-size models with random weights: {', '.join(ARCHITECTURES)}; or {', '.join(EMBEDDED)}, "
        "a folder, a hub id (default: %(default)s)",
    )
    parser.add_argument(
        "--depth", type=float, default=1.0, help="build this share of the blocks, if not all fit (default: 1)"
    )
    parser.add_argument(
        "--size", type=image_size, nargs="+", metavar="S", help="pixels: 1024, or 832x1216 (H x W)"
    )
    parser.add_argument("--batch", type=int, default=1, help="pictures in a call (default: 1)")
    parser.add_argument("--ratio", type=float, nargs="+", help="shares of tokens removed (default: 0.5)")
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="M",
        help=f"any of {', '.join(METHODS)}; settings follow a colon, as in {OURS}:where=span and "
        "deepcache:interval=3; a settings file (FILE.json); a cache can be combined with others by a plus, "
        f"as in first-block+{OURS} (default: all that merge and that the model allows)",
    )
    parser.add_argument("--repeats", type=int, help="rounds, each with one run of every method (default: 3)")
    parser.add_argument(
        "--steps",
        type=int,
        help="time whole generations of N steps, not single calls; with --expect, predict them",
    )
    parser.add_argument(
        "--guidance",
        type=finite,
        help="default: none in single calls, the pipeline's own in generations and with --expect",
    )
    parser.add_argument(
        "--protocol",
        choices=["paper"],
        help="whole generations at 1024, the paper's steps and ratios, 100 rounds",
    )
    parser.add_argument(
        "--expect",
        action="store_true",
        help="time nothing: predict generations on GPUs by a roofline from counted FLOPs, bytes and launches",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: fp32, and fp16 with --expect")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps, ... (default: %(default)s)")
    add_offload_argument(parser)
    add_trust_argument(parser)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own)")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--no-count", action="store_true", help="don't count FLOPs and launches")
    parser.add_argument("--json", type=Path, help="write everything to this new file, after every round")
    parser.add_argument("--resume", action="store_true", help="continue what is in the --json file")
    parser.add_argument("--csv", type=Path, help="write one row for each run")
    parser.add_argument("--plot", type=Path, help="plot speed-up against ratio, and time against size")


def image_size(text: str) -> tuple[int, int]:
    """Height and width, from 1024 or 832x1216."""
    try:
        sides = tuple(int(side) for side in text.lower().split("x"))
        height, width = sides * 2 if len(sides) == 1 else sides
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give 1024, or 832x1216") from None
    if min(height, width) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: sides must be at least 1 pixel")
    return height, width
