"""Arguments of `tomadiff demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .names import EMBEDDED

PROMPTS = (
    "fox on blue",
    "palm tree on the left on pink",
    "cupcake on orange",
    "rocket on the right on purple",
)
STEPS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for the pictures (default: demo)"
    )
    parser.add_argument("--models", nargs="+", choices=EMBEDDED, default=list(EMBEDDED), help="default: both")
    parser.add_argument(
        "--prompts", nargs="+", default=list(PROMPTS), help=f"what to draw (default: {', '.join(PROMPTS)})"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="denoising steps (default: %(default)s)")
    parser.add_argument(
        "--settings", type=Path, nargs="+", default=[], metavar="FILE", help="settings files to compare with"
    )
