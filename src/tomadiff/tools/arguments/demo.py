"""Arguments of `tomadiff demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .names import EMBEDDED

PROMPTS = ("hot dog", "pizza", "fox", "palm tree")
STEPS = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for the pictures (default: demo)"
    )
    parser.add_argument("--models", nargs="+", choices=EMBEDDED, default=list(EMBEDDED), help="default: both")
    parser.add_argument(
        "--prompts", nargs="+", default=list(PROMPTS), help=f"names of emoji (default: {', '.join(PROMPTS)})"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="denoising steps (default: %(default)s)")
    parser.add_argument(
        "--settings", type=Path, nargs="+", default=[], metavar="FILE", help="settings files to compare with"
    )
