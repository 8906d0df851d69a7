"""Arguments of `tomadiff ui`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import add_device_arguments, add_model_argument, add_offload_argument, add_trust_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_device_arguments(parser)
    add_offload_argument(parser)
    add_trust_argument(parser)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own)")
    parser.add_argument(
        "--out", type=Path, help="folder for exports (default: a temporary one, deleted at the end)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    access = parser.add_argument_group("access and limits")
    access.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    access.add_argument("--port", type=int, help="default: the first free one from 7860")
    access.add_argument(
        "--auth", metavar="USER:PASSWORD", help="ask for these; needed to let other machines in"
    )
    access.add_argument("--no-auth", action="store_true", help="let other machines in without asking")
    access.add_argument(
        "--allow-models", action="store_true", help="let visitors choose embedded models and hub ids"
    )
    access.add_argument(
        "--max-size", type=int, help="largest side, in pixels (default: twice the model's own)"
    )
    access.add_argument("--max-steps", type=int, default=100, help="of a picture (default: %(default)s)")
    access.add_argument(
        "--max-queue", type=int, default=8, help="requests that may wait (default: %(default)s)"
    )
