"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import math

from .names import DTYPES, EMBEDDED, OFFLOADS


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=EMBEDDED[0],
        help=f"{', '.join(EMBEDDED)}, a folder, or a hub id (default: %(default)s)",
    )


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps, ... (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="of the weights (default: %(default)s)"
    )


def add_offload_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--offload",
        choices=OFFLOADS,
        help="keep weights in main memory, and bring them to the GPU model by model, in groups while others "
        "compute, or layer by layer: slower, for less and less of its memory",
    )


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code and unpickle weights that come with a model: they can do whatever you can",
    )


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """How to draw a picture: the fields of a `Request` beside its prompt and seed."""
    parser.add_argument("--steps", type=int, help="denoising steps (default: the pipeline's own)")
    parser.add_argument(
        "--size", type=int, nargs=2, metavar=("H", "W"), help="in pixels (default: the pipeline's own)"
    )
    parser.add_argument("--guidance", type=finite, help="guidance scale (default: the pipeline's own)")


def finite(text: str) -> float:
    """A number that is neither NaN nor infinite."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number")
    return number
