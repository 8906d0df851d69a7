"""Arguments of `tomadiff tune`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .evaluate import add_drawing_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    budget = parser.add_argument_group("budget: one of these or both, as a mean over the prompts")
    budget.add_argument("--psnr", type=float, metavar="DB", help="to the dense picture, at least")
    budget.add_argument("--ssim", type=float, metavar="S", help="to the dense picture, at least")
    parser.add_argument(
        "-o", "--output", type=Path, help="the settings file (default: settings.json in the folder)"
    )
    parser.add_argument(
        "--folder", type=Path, help="for pictures and times (default: tuning/ and the model's name)"
    )
    parser.add_argument("--resume", action="store_true", help="continue the search in that folder")
    add_drawing_arguments(parser, limit=8, seeds=1)
