"""Arguments of `tomadiff selftest`."""

from __future__ import annotations

import argparse
from pathlib import Path

SECONDS = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="start no new check after this many seconds (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings to a file")
