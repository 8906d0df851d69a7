"""Arguments of `tomadiff inspect` and `tomadiff families`."""

from __future__ import annotations

import argparse

from .common import add_device_arguments, add_trust_argument
from .names import EMBEDDED


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help=f"{', '.join(EMBEDDED)}, a folder, a hub id, or the name of a model class of diffusers, which "
        "is built with random weights",
    )
    parser.add_argument("--depth", type=int, help="for a class: blocks in each list, 0 for all (default: 2)")
    parser.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="for a pipeline: in pixels")
    add_device_arguments(parser)
    add_trust_argument(parser)


def add_families_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--refused", action="store_true", help="list the architectures that are refused, and why"
    )
    parser.add_argument("--markdown", action="store_true", help="print a table as in docs/families.md")
