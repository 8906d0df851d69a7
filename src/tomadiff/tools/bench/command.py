"""`tomadiff bench`: who is faster, by how much, and how close to what is possible."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from tomadiff.config import Config
from tomadiff.runtime.files import check_writable
from tomadiff.tools.demo.embedded import EMBEDDED
from tomadiff.tools.generate import finite
from tomadiff.tools.loading import DTYPES, add_trust_argument, check_device, check_threads
from tomadiff.tools.method_spec import NAMES, OURS

from . import session
from .architectures import ARCHITECTURES
from .plot import check_plot
from .step import STEPS

PAPER: dict[str, Any] = {"size": [(1024, 1024)], "ratio": [0.25, 0.5, 0.75], "repeats": 100}
MAX_ROUNDS = STEPS - 10  # a step for each, and some to warm up
USUAL: dict[str, Any] = {"ratio": [0.5], "repeats": 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="sdxl",
        help=f"true widths, random weights: {', '.join(ARCHITECTURES)}; or {', '.join(EMBEDDED)}, "
        "a folder, a hub id (default: %(default)s)",
    )
    parser.add_argument(
        "--depth", type=float, default=1.0, help="share of its blocks to build, if it doesn't fit"
    )
    parser.add_argument(
        "--size", type=_size, nargs="+", metavar="S", help="pixels: 1024, or 832x1216 (H x W)"
    )
    parser.add_argument("--batch", type=int, default=1, help="pictures in a call")
    parser.add_argument("--ratio", type=float, nargs="+", help="shares of tokens removed (default: 0.5)")
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="M",
        help=f"any of {', '.join(NAMES)}; single settings follow a colon, as in {OURS}:where=span and "
        "deepcache:interval=3; a settings file (FILE.json); caches also joined by a plus, as in "
        f"first-block+{OURS} (default: all that merge and that the model allows)",
    )
    parser.add_argument("--repeats", type=int, help="rounds, each with one run of every method (default: 3)")
    parser.add_argument("--steps", type=int, help="time whole generations of so many steps, not single calls")
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
        help="time nothing: print what a roofline expects of GPUs, from counted FLOPs, bytes and launches",
    )
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: fp32, and fp16 with --expect")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps, ... (default: %(default)s)")
    add_trust_argument(parser)
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--no-count", action="store_true", help="don't count FLOPs and launches")
    parser.add_argument("--json", type=Path, help="write everything to this new file, after every round")
    parser.add_argument("--resume", action="store_true", help="go on from what is in the --json file")
    parser.add_argument("--csv", type=Path, help="write one row a run")
    parser.add_argument("--plot", type=Path, help="draw speed-up against ratio, and time against size")


def run(args: argparse.Namespace) -> int:
    """Time methods against each other, in turns, on one call of a model or on whole generations."""
    settle(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    return session.run_expect(args) if args.expect else session.run(args)


def settle(args: argparse.Namespace) -> None:
    """Fill in what a protocol or nobody says, and refuse what makes no sense."""
    defaults = PAPER if args.protocol else USUAL
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.dtype is None:
        args.dtype = "fp16" if args.expect else "fp32"
    if args.expect:
        settle_expect(args)
    if args.protocol and args.steps is None:
        args.steps = ARCHITECTURES[args.model].steps if args.model in ARCHITECTURES else 50
    check_threads(args.threads)
    for name in ("batch", "repeats", "steps"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    if args.steps is None and args.repeats > MAX_ROUNDS:
        raise ValueError(f"--repeats {args.repeats}: single calls have steps for {MAX_ROUNDS} rounds at most")
    if args.plot:
        check_plot(args.plot, args.methods)
    for ratio in args.ratio:
        Config(ratio=ratio, regions="global")  # what no method could do is not left out in silence
    check_device(args.device)
    for path in filter(None, (args.json, args.csv, args.plot)):
        check_writable(path)
    if args.json and args.json.exists() and not args.resume:
        raise ValueError(f"{args.json} is there already: add --resume to go on, or take another --json")
    if args.resume and not args.json:
        raise ValueError("--resume goes on from a file: name it with --json")
    if args.depth != 1 and args.model not in ARCHITECTURES:
        raise ValueError(f"--depth builds a model with fewer blocks, and {args.model!r} is there already")


def settle_expect(args: argparse.Namespace) -> None:
    """Without timing, most arguments mean nothing: say so."""
    if args.model not in ARCHITECTURES:
        raise ValueError(f"--expect knows {', '.join(ARCHITECTURES)}, not {args.model!r}")
    flags = ("json", "csv", "plot", "resume", "compile", "no_count", "threads", "steps", "protocol")
    ignored = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag)]
    if ignored:
        raise ValueError(f"--expect times nothing: leave out {', '.join(ignored)}")


def _size(text: str) -> tuple[int, int]:
    try:
        sides = tuple(int(side) for side in text.lower().split("x"))
        height, width = sides * 2 if len(sides) == 1 else sides
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give 1024, or 832x1216") from None
    if min(height, width) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: sides must be at least 1 pixel")
    return height, width
