"""Arguments of `tomadiff generate` and `tomadiff merge-map`."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

from .common import (
    add_device_arguments,
    add_model_argument,
    add_offload_argument,
    add_request_arguments,
    add_trust_argument,
)
from .names import CHOICES, PRESETS

HELP = {
    "method": "the paper's method, or one that it is compared with",
    "where": "merge around each block, each module of a block or a span of blocks, or only keys and values",
    "regions": "tokens are merged within a region",
    "assign": "to destinations in a token's own region, or in all regions",
    "share": "one plan for all sites of a kind, or one for each block",
}
# the settings among the arguments, by their names in `Config`
SETTINGS = (
    "interval",
    "ratio",
    *HELP,
    "region_size",
    "dense_blocks",
    "dense_last_blocks",
    "shift",
    "weigh_keys",
)


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    add_picture_arguments(parser, "out.png")
    parser.add_argument("--num-images", type=int, default=1, help="with consecutive seeds (default: 1)")
    parser.add_argument(
        "--compare", action="store_true", help="draw the dense picture too, beside the other, with both times"
    )


def add_merge_map_arguments(parser: argparse.ArgumentParser) -> None:
    add_picture_arguments(parser, "merge-map.png")
    parser.add_argument(
        "--at",
        type=int,
        nargs="+",
        metavar="STEP",
        help="merged steps to draw, counted from 1 (default: the first, a middle and the last one)",
    )


def add_picture_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    parser.add_argument(
        "prompt",
        help="what to draw; the embedded models know 96 things: 'fox on blue'",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path(output), help=f"default: {output}")
    add_model_argument(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default: %(default)s)")
    add_request_arguments(parser)
    add_device_arguments(parser)
    add_offload_argument(parser)
    add_trust_argument(parser)
    settings = parser.add_argument_group("settings of tomadiff")
    settings.add_argument("--settings", type=Path, metavar="FILE", help="read all of these from a file")
    settings.add_argument(
        "--interval",
        type=literal,
        help="run the model in every N-th step, and forecast its output in the others; or a list of the "
        "steps that run, as in '[0, 2, 5, 6]'; or auto (default: auto, or 1 with --ratio)",
    )
    settings.add_argument(
        "--ratio",
        type=literal,
        help="share of tokens removed, also by level or by steps, as in '{2: 0.75, 4: 0.25}' and "
        "'[(0, 0.25), (0.5, 0.75)]'; or auto: merge where that is faster here (default: the method's own)",
    )
    settings.add_argument("--preset", choices=PRESETS, help="a variant from the paper")
    for name, about in HELP.items():
        settings.add_argument(f"--{name}", choices=CHOICES[name], help=about)
    settings.add_argument("--region-size", type=int, metavar="N", help="side of a tile, in tokens")
    for name, which in (("--dense-blocks", "first"), ("--dense-last-blocks", "last")):
        settings.add_argument(
            name, type=int, metavar="N", help=f"leave the {which} N blocks of each kind dense"
        )
    settings.add_argument(
        "--shift", action="store_true", default=None, help="alternate between two layouts of the regions"
    )
    settings.add_argument(
        "--weigh-keys",
        action="store_true",
        default=None,
        help="weigh a merged key by the number of tokens that it stands for",
    )


def literal(text: str) -> Any:
    """A Python literal, or the text itself; `Config` checks what it means."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
