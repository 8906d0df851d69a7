"""`tomadiff bench`: who is faster, by how much, and how close to what is possible."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import nn

import tomadiff

from ..attachment import denoiser
from ..config import Config
from ..demo.embedded import EMBEDDED
from ..families import Family, family_of
from ..files import write_whole
from ..load import DTYPES, check_device, load, usual_size
from ..machine import processor
from ..named import CACHES, METHODS, NAMES, OURS, configuration, pairs, parse, usual, warn_of_files
from . import expect, figures, models
from .contenders import contender
from .measure import Progress, rounds
from .plot import check_plot, plot
from .record import Record, finished_rounds, write_csv
from .roofline import cpu_device

PAPER: dict[str, Any] = {"size": [(1024, 1024)], "ratio": [0.25, 0.5, 0.75], "repeats": 100}
MOST_ROUNDS = models.STEPS - 10  # a step for each, and some to warm up
USUAL: dict[str, Any] = {"ratio": [0.5], "repeats": 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="sdxl",
        help=f"true widths, random weights: {', '.join(models.ARCHITECTURES)}; or {', '.join(EMBEDDED)}, "
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
        help=f"any of {', '.join(NAMES)}; single settings follow a colon, as in {OURS}:where=span; "
        "a settings file (FILE.json); "
        f"diffusers' caches, {', '.join(CACHES)}, alone or joined by a plus, as in first-block+{OURS} "
        "(default: all that the model allows, but no caches)",
    )
    parser.add_argument("--repeats", type=int, help="rounds, each with one run of every method (default: 3)")
    parser.add_argument("--steps", type=int, help="time whole generations of so many steps, not single calls")
    parser.add_argument(
        "--guidance", type=float, help="default: none in single calls, the pipeline's own in generations"
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
    if args.expect:
        return run_expect(args)
    family = None
    if args.model in models.ARCHITECTURES:  # a mistake should not wait for ten gigabytes
        family = family_of(models.skeleton_of(args.model, args.depth))
        todo = chosen(args, family)
    pipe = pipeline(args)
    model = denoiser(pipe)[0]
    if family is None:
        family = family_of(model)
        todo = chosen(args, family)
    warn_of_files(args.methods or (), model)
    record = Record(about(args))
    if args.resume and args.json.exists():
        record.resume(args.json)
    sizes = args.size or [default_size(args, pipe)]
    for size in sizes:
        finished_rounds(record.runs, size, todo)  # complains about a file of others before anything is done
    try:
        for size in sizes:
            measure_size(args, record, pipe, model, family, size, todo)
    except BaseException as error:
        if record.runs:
            print("\ninterrupted: what follows is what was finished", file=sys.stderr)
            show(args, record)
        if isinstance(error, KeyboardInterrupt) and record.runs:
            return 130
        raise
    show(args, record)
    return 0


def run_expect(args: argparse.Namespace) -> int:
    """Print the expectation for one call, as the pipeline makes it, without building any weights."""
    pipe = models.build(args.model, args.depth, DTYPES[args.dtype], "meta")
    model = denoiser(pipe)[0]
    family = family_of(model)
    for size in args.size or [models.ARCHITECTURES[args.model].size]:
        step = models.capture(pipe, models.arguments(pipe, size, args.batch, args.guidance))
        counted = expect.count_all(step, model, family, size, chosen(args, family))
        blocks = models.depth_note(args.model, args.depth) or "all blocks"
        guided = "the pipeline's own guidance" if args.guidance is None else f"guidance {args.guidance:g}"
        print(
            f"{args.model}, {blocks}, {size[0]} x {size[1]}, batch {args.batch}, {guided}, {args.dtype}: "
            "expected, not measured; share of the time of a call that is saved"
        )
        print(expect.table(counted))
    return 0


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
        args.steps = models.ARCHITECTURES[args.model].steps if args.model in models.ARCHITECTURES else 50
    for name in ("batch", "repeats", "steps", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    if args.steps is None and args.repeats > MOST_ROUNDS:
        raise ValueError(
            f"--repeats {args.repeats}: single calls have steps for {MOST_ROUNDS} rounds at most"
        )
    if args.plot:
        check_plot(args.methods)
    for ratio in args.ratio:
        Config(ratio=ratio, regions="global")  # what no method could do is not left out in silence
    check_device(args.device)
    if args.json and args.json.exists() and not args.resume:
        raise ValueError(f"{args.json} is there already: add --resume to go on, or take another --json")
    if args.resume and not args.json:
        raise ValueError("--resume goes on from a file: name it with --json")
    if args.depth != 1 and args.model not in models.ARCHITECTURES:
        raise ValueError(f"--depth builds a model with fewer blocks, and {args.model!r} is there already")
    for path in filter(None, (args.json, args.csv, args.plot)):
        if not path.parent.is_dir():
            raise ValueError(f"can't write {path}: there is no folder {path.parent}")


def settle_expect(args: argparse.Namespace) -> None:
    """Without timing, most arguments mean nothing: say so."""
    if args.model not in models.ARCHITECTURES:
        raise ValueError(f"--expect knows {', '.join(models.ARCHITECTURES)}, not {args.model!r}")
    flags = ("json", "csv", "plot", "resume", "compile", "no_count", "threads", "steps", "protocol")
    ignored = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag)]
    if ignored:
        raise ValueError(f"--expect times nothing: leave out {', '.join(ignored)}")


def chosen(args: argparse.Namespace, family: Family) -> list[tuple[str, float]]:
    """Methods and ratios to measure."""
    measured, left_out = pairs(args.methods or usual(args.ratio, family), args.ratio, family)
    for part, ratio in [(part, ratio) for method, ratio in measured for part in method.split("+")]:
        name, _ = parse(part)
        if name in CACHES and args.model in models.ARCHITECTURES:
            raise ValueError(f"{part} decides by what a model computes, which random weights don't tell")
        uneven = name in CACHES or (name in METHODS and configuration(part, ratio, family).uneven)
        if uneven and not args.steps:
            raise ValueError(f"{part}: steps of a generation differ, and single calls don't; add --steps")
    for line in left_out:
        print(line, file=sys.stderr)
    return measured


def pipeline(args: argparse.Namespace) -> DiffusionPipeline:
    if args.model not in models.ARCHITECTURES:
        pipe = load(args.model, args.device, args.dtype, [*models.ARCHITECTURES, *EMBEDDED])
    else:
        print(f"building {models.ARCHITECTURES[args.model].title} with random weights...", file=sys.stderr)
        torch.manual_seed(0)
        pipe = models.build(
            args.model, args.depth, DTYPES[args.dtype], args.device, decoder=args.steps is not None
        )
    pipe.set_progress_bar_config(disable=True)
    if args.compile:
        # one program for each method; the name of the limit changed between versions
        for limit in ("recompile_limit", "cache_size_limit"):
            if hasattr(torch._dynamo.config, limit):
                setattr(torch._dynamo.config, limit, 256)
                break
        denoiser(pipe)[0].compile()
    return pipe


def default_size(args: argparse.Namespace, pipe: DiffusionPipeline) -> tuple[int, int]:
    if args.model in models.ARCHITECTURES:
        return models.ARCHITECTURES[args.model].size
    size = usual_size(pipe)
    if size is None:
        raise ValueError(f"{type(pipe).__name__} has no usual size: give one with --size")
    return size


def measure_size(
    args: argparse.Namespace,
    record: Record,
    pipe: DiffusionPipeline,
    model: nn.Module,
    family: Family,
    size: tuple[int, int],
    todo: Sequence[tuple[str, float]],
) -> None:
    """Count and time all methods on pictures of one size, and keep the record up to date."""
    whole = args.steps is not None
    guidance = args.guidance if args.steps or args.guidance else 1.0
    arguments = models.arguments(pipe, size, args.batch, guidance)
    step = models.capture(pipe, arguments)
    if not args.no_count:
        counted = expect.count_all(step, model, family, size, todo)
        # the roofline can be checked where its peaks can be measured
        device = cpu_device() if (args.device, args.dtype, whole) == ("cpu", "fp32", False) else None
        record.counts = [row for row in record.counts if row["size"] != size]
        record.counts += expect.rows(counted, size, device)
    entries = [contender(model, pipe if whole else None, *pair) for pair in todo]
    record.settings |= {entry.label: entry.settings for entry in entries}
    record.keep_steps |= {entry.method: 1 if whole else entry.keeps_plans_for for entry in entries}
    record.dense_every |= {entry.method: 0 if whole else entry.dense_every for entry in entries}
    call = partial(generate, pipe, arguments, args.steps) if whole else step
    done = finished_rounds(record.runs, size, todo)
    numbers = [number for number in range(args.repeats) if number not in done]
    record.runs = [run for run in record.runs if run.size != size or run.round in done]
    if not numbers:
        return
    progress = partial(tell, f"{size[0]} x {size[1]}")
    for runs in rounds(call, entries, size, numbers, torch.device(args.device), whole, progress):
        record.runs += runs
        if args.json:
            record.save(args.json)


def generate(pipe: DiffusionPipeline, arguments: dict[str, Any], steps: int, number: int) -> Any:
    """One whole generation, the same in every round."""
    return pipe(**arguments, num_inference_steps=steps, generator=torch.Generator().manual_seed(0))


def tell(what: str, progress: Progress) -> None:
    left = f"{progress.left / 60:.0f} min" if progress.left >= 60 else f"{progress.left:.0f} s"
    print(
        f"[{what}: {progress.done}/{progress.of}, {left} left] {progress.label}: {progress.seconds:.2f} s",
        file=sys.stderr,
    )


def about(args: argparse.Namespace) -> dict[str, Any]:
    """All that a figure depends on, apart from what has a column of its own."""
    named = args.model in models.ARCHITECTURES
    return {
        "model": args.model,
        "depth": args.depth,
        "blocks": models.depth_note(args.model, args.depth) or "all" if named else "all",
        "weights": "random" if named else "its own",
        "unit": f"generation of {args.steps} steps" if args.steps else "call",
        "batch": args.batch,
        "guidance": args.guidance,
        "dtype": args.dtype,
        "device": args.device,
        "processor": processor(args.device),
        "threads": torch.get_num_threads(),
        "compile": args.compile,
        "tomadiff": tomadiff.__version__,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "python": platform.python_version(),
    }


def show(args: argparse.Namespace, record: Record) -> None:
    """The table and the words on the screen, and the files that were asked for."""
    rows, unit = record.rows(), "call" if args.steps is None else "image"
    print(", ".join(f"{key} {value}" for key, value in record.about.items()))
    print(figures.table(rows, unit))
    print(*figures.words(rows), sep="\n")
    if args.json:
        record.save(args.json)
    if args.csv:
        write_whole(args.csv, partial(write_csv, record))
    if args.plot:
        of = "" if record.about["blocks"] == "all" else f", {record.about['blocks']}"
        plot(rows, f"{args.model}{of}, {args.dtype}, {record.about['processor']}", args.plot)


def _size(text: str) -> tuple[int, int]:
    try:
        sides = tuple(int(side) for side in text.lower().split("x"))
        height, width = sides * 2 if len(sides) == 1 else sides
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give 1024, or 832x1216") from None
    if min(height, width) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: sides must be at least 1 pixel")
    return height, width
