"""Timing: contenders take turns in one process, so that only neighbours are compared.

Timings on a shared machine swing by a factor of two from one minute to the next; ratios within a round don't.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core import Schedule
from .contenders import Contender

Call = Callable[[int], Any]  # one call of the model at a step, or one whole generation


@dataclass(frozen=True)
class Run:
    """One timed call of one contender."""

    size: tuple[int, int]
    method: str
    ratio: float
    round: int
    seconds: float
    # of these, or beside these where plans are kept for several steps; None where nobody can tell
    plan_seconds: float | None
    merge_seconds: float | None
    unmerge_seconds: float | None
    peak_bytes: int


@dataclass(frozen=True)
class Progress:
    done: int
    of: int
    label: str
    seconds: float
    left: float  # seconds


def rounds(
    call: Call,
    contenders: Sequence[Contender],
    size: tuple[int, int],
    numbers: Sequence[int],
    device: torch.device,
    whole: bool,
    progress: Callable[[Progress], Any],
) -> Iterator[list[Run]]:
    """Warm everything up, then go round: each item is one round, with a run of every contender in it.

    In single calls, the making of plans that are kept for several steps is timed apart, and figures add its
    share. In `whole` generations, everything is in the time.
    """
    total = len(contenders) * (len(numbers) + 1)
    begin, done = time.perf_counter(), 0

    def report(label: str, seconds: float) -> None:
        nonlocal done
        done += 1
        left = (time.perf_counter() - begin) / done * (total - done)
        progress(Progress(done, total, label, seconds, left))

    planning: dict[str, float | None] = {}
    for contender in contenders:
        apart = not (whole or contender.plans_in_every_call)
        start = time.perf_counter()
        planning[contender.label] = _warm_up(call, contender, device, apart)
        report(f"{contender.label}, warming up", time.perf_counter() - start)
    for number in numbers:
        runs = []
        for contender in contenders:
            apart = not (whole or contender.plans_in_every_call)
            runs.append(_timed(call, contender, size, number, device, apart, planning[contender.label]))
            report(contender.label, runs[-1].seconds)
        yield runs


def _warm_up(call: Call, contender: Contender, device: torch.device, apart: bool) -> float | None:
    """A first call; on a device that runs behind our back, also what planning takes: later calls reuse it."""
    patch = contender.patch
    with contender.use():
        call(0)
        synchronise(device)
        if not apart or device.type == "cpu":
            return None
        patch.plans.clear()
        patch.seconds["plan"], patch.synchronise = 0.0, True
        call(1)
        patch.synchronise = False
        seconds = patch.seconds["plan"]
        call(2)  # where layouts take turns, the plan of the other one
        patch.schedule = Schedule(10**9, 10**9)
        return seconds


def _timed(
    call: Call,
    contender: Contender,
    size: tuple[int, int],
    number: int,
    device: torch.device,
    apart: bool,
    planning: float | None,
) -> Run:
    """One run. On the CPU, which tells what it spent on what, plans are made in every one of them."""
    patch = contender.patch
    if apart and device.type == "cpu":
        patch.plans.clear()
    before = dict(patch.seconds) if patch else {}
    with contender.use():
        reset_peak(device)
        synchronise(device)
        start = time.perf_counter()
        call(number + 3)  # steps 0, 1 and 2 were for warming up
        synchronise(device)
        seconds = time.perf_counter() - start
    parts: dict[str, float | None] = {"plan": planning, "merge": None, "unmerge": None}
    if patch and patch.timed:
        parts = {part: patch.seconds[part] - before[part] for part in parts}
        seconds -= parts["plan"] if apart else 0.0
    return Run(
        size=size,
        method=contender.method,
        ratio=contender.ratio,
        round=number,
        seconds=seconds,
        plan_seconds=parts["plan"],
        merge_seconds=parts["merge"],
        unmerge_seconds=parts["unmerge"],
        peak_bytes=peak(device),
    )


def synchronise(device: torch.device) -> None:
    """Wait until the device has done everything it was asked for."""
    torch.get_device_module(device).synchronize()


def reset_peak(device: torch.device) -> None:
    """Forget the most memory there ever was: the device's, or this process's, which the kernel keeps."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int:
    """The most memory since then, in bytes; 0 where nobody tells."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
