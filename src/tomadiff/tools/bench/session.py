"""A benchmark from its arguments to its figures: choose contenders, time them in turns, save every round."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import nn

import tomadiff
from tomadiff import kernels
from tomadiff.models import family_of
from tomadiff.runtime.files import atomic_write
from tomadiff.runtime.machine import processor
from tomadiff.runtime.registration import denoiser
from tomadiff.tools.demo.embedded import EMBEDDED
from tomadiff.tools.denoiser_flops import counted
from tomadiff.tools.loading import DTYPES, load, place, usual_size
from tomadiff.tools.method_spec import (
    AUTO,
    METHODS,
    calibrate,
    check_fit,
    configuration,
    decides,
    is_per_step,
    label,
    pairs,
    parse,
    parts_of,
    steps_of,
    usual,
    warn_of_files,
)

from . import expect, figures, models
from .architectures import ARCHITECTURES
from .compiled import compiled_contenders
from .contenders import Contender, in_turns
from .measure import Progress, rounds
from .plot import plot
from .record import Record, finished_rounds, write_csv
from .roofline import cpu_device
from .step import capture


def run(args: argparse.Namespace) -> int:
    """Time every method at every size; if interrupted, show the rounds that were finished."""
    if args.model in ARCHITECTURES:  # report mistakes before building gigabytes of weights
        todo = chosen(args, models.skeleton_of(args.model, args.depth))
        pipe = pipeline(args)
    else:
        pipe = pipeline(args)
        todo = chosen(args, denoiser(pipe)[0])
    check_fit(pipe, todo)
    warn_of_files(args.methods or (), denoiser(pipe)[0])
    record = Record(about(args))
    if args.resume and args.json.exists():
        record.resume(args.json)
    sizes = args.size or [default_size(args, pipe)]
    for size in sizes:
        finished_rounds(record.runs, size, todo)  # raises early if the file has other methods
    try:
        for size in sizes:
            measure_size(args, record, pipe, size, todo)
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
    """Print the predicted times of whole generations, without building any weights."""
    pipe = models.build(args.model, args.depth, DTYPES[args.dtype], "meta")
    todo = chosen(args, denoiser(pipe)[0])
    blocks = models.depth_note(args.model, args.depth) or "all blocks"
    guided = "the pipeline's own guidance" if args.guidance is None else f"guidance {args.guidance:g}"
    for size in args.size or [ARCHITECTURES[args.model].size]:
        step = capture(pipe, models.arguments(pipe, size, args.batch, args.guidance))
        counted = expect.count_all(step, size, todo, kernels=True)
        predicted = expect.generations(pipe, counted, todo, args.steps)
        for method, ratio in todo:
            if label(method, ratio) not in predicted:
                print(f"{label(method, ratio)} is left out: its steps can't be counted", file=sys.stderr)
        print(
            f"{args.model}, {blocks}, {size[0]} x {size[1]}, batch {args.batch}, {guided}, {args.dtype}, "
            f"{args.steps} steps of the denoiser: expected, not measured; share of the time that is saved"
        )
        for mode in ("eager", "compiled"):
            print(f"\n{mode}:\n\n{expect.table(predicted, mode == 'compiled')}")
    return 0


def chosen(args: argparse.Namespace, model: nn.Module) -> list[tuple[str, float]]:
    """The methods and ratios to measure."""
    family = family_of(model)
    measured, left_out = pairs(args.methods or usual(args.ratio, family), args.ratio, family)
    for part, ratio in [(part, ratio) for method, ratio in measured for part in parts_of(method)]:
        name, _ = parse(part)
        if decides(part) and args.model in ARCHITECTURES:
            raise ValueError(f"{part} decides by what a model computes, which random weights don't tell")
        ours = name in METHODS or name == AUTO
        uneven = not is_per_step(part) or (ours and configuration(part, ratio, family).resolve(family).uneven)
        if uneven and not args.steps:
            raise ValueError(f"{part}: steps of a generation differ, and single calls don't; add --steps")
    check_fit(model, measured)
    for line in left_out:
        print(line, file=sys.stderr)
    return measured


def pipeline(args: argparse.Namespace) -> DiffusionPipeline:
    if args.model not in ARCHITECTURES:
        names = [*ARCHITECTURES, *EMBEDDED]
        pipe = load(args.model, args.device, args.dtype, names, args.trust_remote_code, args.offload)
    else:
        print(f"building {ARCHITECTURES[args.model].title} with random weights...", file=sys.stderr)
        torch.manual_seed(0)
        made_on, decoder = "cpu" if args.offload else args.device, args.steps is not None
        pipe = models.build(args.model, args.depth, DTYPES[args.dtype], made_on, decoder)
        place(pipe, args.device, args.offload)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def default_size(args: argparse.Namespace, pipe: DiffusionPipeline) -> tuple[int, int]:
    if args.model in ARCHITECTURES:
        return ARCHITECTURES[args.model].size
    size = usual_size(pipe)
    if size is None:
        raise ValueError(f"{type(pipe).__name__} has no usual size: give one with --size")
    return size


def measure_size(
    args: argparse.Namespace,
    record: Record,
    pipe: DiffusionPipeline,
    size: tuple[int, int],
    todo: Sequence[tuple[str, float]],
) -> None:
    """Count and time all methods on images of one size, and keep the record up to date."""
    whole = args.steps is not None
    guidance = args.guidance if whole or args.guidance else 1.0
    arguments = models.arguments(pipe, size, args.batch, guidance)
    step = capture(pipe, arguments)
    if not args.no_count:
        run_kernels = kernels_run(args.device, DTYPES[args.dtype])
        counts = expect.count_all(step, size, todo, kernels=run_kernels)
        # the roofline model can be checked on the CPU, whose peaks can be measured
        device = cpu_device() if (args.device, args.dtype, whole) == ("cpu", "fp32", False) else None
        record.counts = [row for row in record.counts if row["size"] != size]
        record.counts += expect.rows(counts, size, device)

    def calls(pipe: DiffusionPipeline, method: str | None = None) -> Callable[[int], Any]:
        steps = (method and steps_of(method)) or args.steps
        return partial(generate, pipe, arguments, steps) if whole else replace(step, model=denoiser(pipe)[0])

    def one_step(pipe: DiffusionPipeline, entry: Contender) -> Callable[[int], Any] | None:
        # one step warms up a generation whose steps are alike; to be counted or compiled, it must be whole
        alike = all(is_per_step(part) or parse(part)[0] == "steps" for part in parts_of(entry.method))
        uneven = entry.config is not None and entry.config.uneven
        if not whole or not args.no_count or args.compile or not alike or uneven:
            return None
        return partial(generate, pipe, arguments, 1)

    def prepare(pipe: DiffusionPipeline, method: str) -> None:
        calibrate(pipe, method, partial(calls(pipe), 0))

    contenders = compiled_contenders if args.compile else in_turns
    with contenders(pipe, whole, todo, prepare) as made:
        entries = [
            replace(entry, call=calls(own, entry.method), warm_up=one_step(own, entry)) for entry, own in made
        ]
        time_all(args, record, pipe, size, todo, entries)


def kernels_run(device: str, dtype: torch.dtype) -> bool:
    """Whether kernels are used on a device, in tiles of 64 tokens and at ratio 0.5, as by default."""
    return kernels.usable(torch.empty(0, device=device, dtype=dtype), 64, 32, regression=True)


def time_all(
    args: argparse.Namespace,
    record: Record,
    pipe: DiffusionPipeline,
    size: tuple[int, int],
    todo: Sequence[tuple[str, float]],
    entries: Sequence[Contender],
) -> None:
    """Time contenders at one size, each with its own call, for all remaining rounds."""
    whole = args.steps is not None
    record.settings |= {entry.label: entry.settings for entry in entries}
    record.keep_steps |= {entry.method: 1 if whole else entry.steps_per_plan for entry in entries}
    done = finished_rounds(record.runs, size, todo)
    numbers = [number for number in range(args.repeats) if number not in done]
    record.runs = [run for run in record.runs if run.size != size or run.round in done]
    if not numbers:
        return
    progress = partial(tell, f"{size[0]} x {size[1]}")
    # counting adds hooks to a model; without them, it would have to be compiled again
    counts = whole and not args.no_count and not args.compile
    count = partial(counted, pipe) if counts else None
    flops: dict[str, int] = {}
    device = torch.device(args.device)
    for runs in rounds(None, entries, size, numbers, device, whole, progress, count, flops):
        record.add_work(size, {(entry.method, entry.ratio): flops.get(entry.label) for entry in entries})
        record.runs += runs
        if args.json:
            record.save(args.json)


def generate(pipe: DiffusionPipeline, arguments: dict[str, Any], steps: int, number: int) -> Any:
    """Run one whole generation, with the same seed in every round."""
    return pipe(**arguments, num_inference_steps=steps, generator=torch.Generator().manual_seed(0))


def tell(what: str, progress: Progress) -> None:
    left = f"{progress.left / 60:.0f} min" if progress.left >= 60 else f"{progress.left:.0f} s"
    print(
        f"[{what}: {progress.done}/{progress.of}, {left} left] {progress.label}: {progress.seconds:.2f} s",
        file=sys.stderr,
    )


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that a figure depends on, except what has its own column."""
    named = args.model in ARCHITECTURES
    return {
        "model": args.model,
        "depth": args.depth,
        "blocks": models.depth_note(args.model, args.depth) or "all",
        "weights": "random" if named else "its own",
        "unit": f"generation of {args.steps} steps" if args.steps else "call",
        "batch": args.batch,
        "guidance": args.guidance,
        "dtype": args.dtype,
        "device": args.device,
        "processor": processor(args.device),
        "threads": torch.get_num_threads(),
        "compile": args.compile,
        "offload": args.offload,
        "tomadiff": tomadiff.__version__,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "python": platform.python_version(),
    }


def show(args: argparse.Namespace, record: Record) -> None:
    """Print the table and the verdicts, and write the requested files."""
    rows, unit = record.rows(), "call" if args.steps is None else "image"
    print(", ".join(f"{key} {value}" for key, value in record.about.items()))
    print(figures.table(rows, unit))
    print(*figures.words(rows), sep="\n")
    if args.json:
        record.save(args.json)
    if args.csv:
        atomic_write(args.csv, partial(write_csv, record))
    if args.plot:
        of = "" if record.about["blocks"] == "all" else f", {record.about['blocks']}"
        plot(rows, f"{args.model}{of}, {args.dtype}, {record.about['processor']}", args.plot)
