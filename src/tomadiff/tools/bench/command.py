"""`tomadiff bench`: how fast each method is, compared with dense and with the ideal speed-up."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from tomadiff.config import Config
from tomadiff.runtime.files import check_writable
from tomadiff.tools.loading import check_device, check_offload, check_threads

from . import session
from .architectures import ARCHITECTURES
from .plot import check_plot
from .step import STEPS

PAPER: dict[str, Any] = {"size": [(1024, 1024)], "ratio": [0.25, 0.5, 0.75], "repeats": 100}
MAX_ROUNDS = STEPS - 10  # each round takes one step of the table, and warming up takes some
USUAL: dict[str, Any] = {"ratio": [0.5], "repeats": 3}


def run(args: argparse.Namespace) -> int:
    """Run `tomadiff bench`."""
    resolve_arguments(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    return session.run_expect(args) if args.expect else session.run(args)


def resolve_arguments(args: argparse.Namespace) -> None:
    """Fill in defaults, those of the protocol if one was given, and refuse arguments that make no sense."""
    defaults = PAPER if args.protocol else USUAL
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.dtype is None:
        args.dtype = "fp16" if args.expect else "fp32"
    if args.expect:
        check_expect_arguments(args)
    if (args.protocol or args.expect) and args.steps is None:
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
        Config(ratio=ratio, regions="global")  # raises for a ratio that no method can do
    check_device(args.device)
    check_offload(args.offload, args.device)
    if args.offload and args.compile:
        raise ValueError("--offload moves the weights that compiled models share: leave out --compile")
    for path in filter(None, (args.json, args.csv, args.plot)):
        check_writable(path)
    if args.json and args.json.exists() and not args.resume:
        raise ValueError(f"{args.json} exists: add --resume to continue it, or choose another --json")
    if args.resume and not args.json:
        raise ValueError("--resume continues a file: name it with --json")
    if args.depth != 1 and args.model not in ARCHITECTURES:
        raise ValueError(f"--depth builds a model with fewer blocks, and {args.model!r} is built already")


def check_expect_arguments(args: argparse.Namespace) -> None:
    """Refuse arguments that have no meaning with --expect, which times nothing."""
    if args.model not in ARCHITECTURES:
        raise ValueError(f"--expect knows {', '.join(ARCHITECTURES)}, not {args.model!r}")
    files, others = ("json", "csv", "plot", "resume"), ("no_count", "threads", "protocol")
    flags = (*files, "compile", "offload", *others)
    ignored = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag)]
    if ignored:
        raise ValueError(f"--expect times nothing: leave out {', '.join(ignored)}")
