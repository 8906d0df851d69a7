"""Time dense and merged calls and generations, and memory, of SDXL with random weights, as large as fits."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from diffusers import DiffusionPipeline

import tomadiff
from tomadiff.runtime.machine import out_of_memory, wait_for
from tomadiff.runtime.registration import denoiser, session_of
from tomadiff.tools.bench import models
from tomadiff.tools.bench.contenders import in_turns
from tomadiff.tools.bench.measure import rounds
from tomadiff.tools.bench.step import Step, capture
from tomadiff.tools.demo.embedded import load_embedded

from .finding import Finding, left_out, time_is_over

# share of the blocks and image side in pixels, from full size down to what fits on small GPUs
SIZES = ((1.0, 1024), (0.5, 1024), (0.25, 768), (0.1, 512))
STEPS = 20
ROUNDS = 3
# Image side in pixels for the host's time. CUDA's queue holds about a thousand kernels; with a large image it
# fills up on the way through a call, and the host has to wait, so that its time would be the device's.
HOST_SIDE = 256
LEFT = 32 * 2**20  # bytes that may still be allocated after a generation


def speed(device: torch.device) -> Iterator[Finding]:
    """Measure the largest model that fits; on a CPU, the embedded model of the same architecture."""
    if device.type == "cpu":
        embedded = load_embedded("emoji-unet")
        embedded.set_progress_bar_config(disable=True)
        yield from _measured(embedded, "emoji-unet", {"prompt": ["pizza"]}, device)
        return
    for depth, side in SIZES:
        try:
            yield from _of_size(depth, side, device)
            return
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        # Not above, where the error's traceback still holds the model, parts of which hold each other.
        gc.collect()
        torch.cuda.empty_cache()
    yield Finding("SDXL's shape", None, "does not fit in the free memory, not even in small")


def _of_size(depth: float, side: int, device: torch.device) -> Iterator[Finding]:
    pipe = models.build("sdxl", depth, torch.float16, device, decoder=True)
    pipe.set_progress_bar_config(disable=True)
    note = models.depth_note("sdxl", depth) or "all blocks"
    arguments = models.arguments(pipe, (side, side))
    yield from _measured(pipe, f"SDXL's shape, {note}, {side} x {side}, fp16", arguments, device)


def _measured(
    pipe: DiffusionPipeline, title: str, arguments: dict[str, Any], device: torch.device
) -> Iterator[Finding]:
    step = capture(pipe, arguments)
    yield _calls(pipe, title, step, device)
    yield _host(pipe, title, device)
    if time_is_over():
        yield left_out(f"a generation of {STEPS} steps, {title}")
        return
    yield from _generations(pipe, title, arguments, device)


def _calls(pipe: DiffusionPipeline, title: str, step: Step, device: torch.device) -> Finding:
    """The time of a call: medians over rounds in which the methods take turns."""
    todo = [("dense", 0.0), ("ideal", 0.5), ("tomadiff", 0.5)]
    seconds: dict[str, list[float]] = {method: [] for method, _ in todo}
    with in_turns(pipe, False, todo, lambda pipe, method: None) as made:
        entries = [entry for entry, _ in made]
        for runs in rounds(step, entries, (0, 0), range(ROUNDS), device, False, lambda progress: None):
            for run in runs:
                seconds[run.method].append(1000 * run.seconds)
    medians = {method: statistics.median(taken) for method, taken in seconds.items()}
    words = ", ".join(f"{method} {taken:.1f} ms" for method, taken in medians.items())
    return Finding(f"a call, {title}", None, words, {f"{method}_ms": ms for method, ms in medians.items()})


def _host(pipe: DiffusionPipeline, title: str, device: torch.device) -> Finding:
    """The time until the host has launched all kernels of a call, dense and merged, for a small image.

    A larger one has about as many kernels.
    """
    if device.type == "cpu":
        return Finding(f"host time of a call, {title}", None, "on a CPU the host is the device: not measured")
    step = capture(pipe, models.arguments(pipe, (HOST_SIDE, HOST_SIDE)))
    taken = []
    for settings in ({"ratio": 0}, {"ratio": 0.5, "interval": 1}):
        with tomadiff.merged(step.model, **settings):
            for n in range(3):
                step(n)
            spent = []
            for n in range(3, 3 + ROUNDS):
                wait_for(device)
                start = time.perf_counter()
                step(n)
                spent.append(time.perf_counter() - start)
            wait_for(device)
        taken.append(1000 * statistics.median(spent))
    dense, merged = taken
    figures = {"dense_ms": dense, "merged_ms": merged, "side": HOST_SIDE}
    size = f"of {HOST_SIDE} x {HOST_SIDE} pixels, so that the host needn't wait for the device"
    words = f"dense {dense:.1f} ms, merged {merged:.1f} ms, {size}"
    return Finding(f"host time of a call, {title}", None, words, figures)


def _generations(
    pipe: DiffusionPipeline, title: str, arguments: dict[str, Any], device: torch.device
) -> Iterator[Finding]:
    """Generations, dense and with apply(pipe): total time, time of a skipped step, and memory."""
    dense, _, _, peak, _ = _generation(pipe, arguments, device)
    tomadiff.apply(pipe)
    try:
        _generation(pipe, arguments, device)  # warm-up
        taken, run, skipped, most, left = _generation(pipe, arguments, device)
    finally:
        tomadiff.remove(pipe)
    figures = {"dense_s": dense, "applied_s": taken, "skipped_step_ms": skipped, "run_step_ms": run}
    parts = "" if skipped is None else f"; a skipped step takes {skipped:.1f} ms, one that runs {run:.1f} ms"
    words = f"{dense:.2f} s dense, {taken:.2f} s with apply(pipe), {dense / taken:.2f}x{parts}"
    yield Finding(f"a generation of {STEPS} steps, {title}", None, words, figures)
    if device.type == "cuda":
        words = (
            f"at most {most / 2**20:.0f} MB ({peak / 2**20:.0f} dense), {left / 2**20:.0f} MB left afterwards"
        )
        figures = {"peak_bytes": most, "dense_peak_bytes": peak, "left_bytes": left}
        yield Finding(f"memory of a generation, {title}", left <= LEFT, words, figures)


def _generation(
    pipe: DiffusionPipeline, arguments: dict[str, Any], device: torch.device
) -> tuple[float, float | None, float | None, int, int]:
    """Seconds in all, milliseconds of a step that runs and of a skipped one, peak bytes, bytes left over."""
    session = session_of(denoiser(pipe)[0])
    ends: list[tuple[float, int]] = []  # for each step: when it ended, and how many were skipped until then

    def note(pipe: Any, step: int, time_step: Any, values: dict[str, Any]) -> dict[str, Any]:
        wait_for(device)
        ends.append((time.perf_counter(), session.counts.steps["forecast"] if session else 0))
        return values

    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    wait_for(device)
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    pipe(**arguments, num_inference_steps=STEPS, generator=generator, callback_on_step_end=note)
    wait_for(device)
    seconds = time.perf_counter() - start
    steps = [(1000 * (b - a), later > earlier) for (a, earlier), (b, later) in pairwise(ends)]
    run, skipped = ([taken for taken, skips in steps if skips is which] for which in (False, True))
    cuda = device.type == "cuda"
    return (
        seconds,
        statistics.median(run) if run else None,
        statistics.median(skipped) if skipped else None,
        torch.cuda.max_memory_allocated(device) if cuda else 0,
        torch.cuda.memory_allocated(device) - before if cuda else 0,
    )
