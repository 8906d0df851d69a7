"""Timing: contenders take turns in one process, and only runs of the same round are compared.

Timings on a shared machine vary by a factor of two from one minute to the next; ratios within a round don't.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils

from tomadiff.core import RefreshSchedule
from tomadiff.runtime.machine import wait_for
from tomadiff.tools.denoiser_flops import Work

from .contenders import Contender

Call = Callable[[int], Any]  # one call of the model at a step, or one whole generation


PARTS = ("plan", "merge", "unmerge")


@dataclass(frozen=True)
class Run:
    """One timed call of one contender."""

    size: tuple[int, int]
    method: str
    ratio: float
    round: int
    seconds: float
    # Parts of `seconds`, except that planning is not included if plans are reused for several steps. None if
    # unknown.
    plan_seconds: float | None
    merge_seconds: float | None
    unmerge_seconds: float | None
    peak_bytes: int
    level_bytes: int = 0  # memory in use before the call: weights, and plans of other contenders


@dataclass(frozen=True)
class Progress:
    done: int
    of: int
    label: str
    seconds: float
    left: float  # estimated seconds until the end


def rounds(
    call: Call | None,
    contenders: Sequence[Contender],
    size: tuple[int, int],
    numbers: Sequence[int],
    device: torch.device,
    whole: bool,
    progress: Callable[[Progress], Any],
    count: Callable[[], AbstractContextManager[Work]] | None = None,
    flops: dict[str, int] | None = None,
) -> Iterator[list[Run]]:
    """Warm up all contenders, then yield one round after the other, each with a run of every contender.

    `call` is used for contenders that have no call of their own.

    Every other round goes in reverse order, so that no contender always follows the same one. For single
    calls, plans that are reused for several steps are timed separately, and `figures` adds their share. The
    time of `whole` generations includes everything; if `count` is given, it counts the warm-up runs, and
    `flops` receives each contender's FLOPs.
    """
    total = len(contenders) * (len(numbers) + 1)
    warming: list[float] = []  # seconds of each run, which may be shorter than those that are timed
    timed: list[float] = []

    def report(label: str, seconds: float, times: list[float]) -> None:
        times.append(seconds)
        done = len(warming) + len(timed)
        left = statistics.mean(timed or warming) * (total - done)
        progress(Progress(done, total, label, seconds, left))

    spent: dict[str, dict[str, float | None]] = {}
    for contender in contenders:
        start = time.perf_counter()
        with count() if count else nullcontext() as work:
            first = contender.warm_up or _call_of(contender, call)
            spent[contender.label] = _warm_up(first, contender, device, whole)
        if work is not None and flops is not None:
            flops[contender.label] = work.flops
        report(f"{contender.label}, warming up", time.perf_counter() - start, warming)
    for number in numbers:
        runs = []
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            own = _call_of(contender, call)
            runs.append(_timed(own, contender, size, number, device, whole, spent[contender.label]))
            report(contender.label, runs[-1].seconds, timed)
        yield runs


def _call_of(contender: Contender, everybodys: Call | None) -> Call:
    call = contender.call or everybodys
    if call is None:
        raise ValueError(f"{contender.label} has nothing to call")
    return call


def _warm_up(call: Call, contender: Contender, device: torch.device, whole: bool) -> dict[str, float | None]:
    """Make a first call. On asynchronous devices, also measure the time of plan, merge and unmerge."""
    patch = contender.patch
    with contender.use():
        call(0)
        wait_for(device)
        if patch is None or whole or device.type == "cpu":
            return dict.fromkeys(PARTS)
        plans, times = patch.plans, patch.times
        plans.clear()
        before, times.synchronise = dict(times.seconds), True
        call(1)
        times.synchronise = False
        spent: dict[str, float | None] = {part: times.seconds[part] - before[part] for part in PARTS}
        if contender.steps_per_plan > 1:
            call(2)  # if two layouts of regions alternate, this makes the other one's plan
            plans.schedule = RefreshSchedule(10**9, 10**9)  # timed calls reuse these plans
        return spent


def _timed(
    call: Call,
    contender: Contender,
    size: tuple[int, int],
    number: int,
    device: torch.device,
    whole: bool,
    spent: dict[str, float | None],
) -> Run:
    """One run. On the CPU, where planning can be timed within a call, every single call makes new plans."""
    patch = contender.patch
    if patch and not whole and device.type == "cpu":
        patch.plans.clear()
    before = dict(patch.times.seconds) if patch else {}
    with contender.use():
        level, compiled = reset_peak(device), graphs()
        wait_for(device)
        start = time.perf_counter()
        call(number + 3)  # warming up took steps 0, 1 and 2
        wait_for(device)
        seconds = time.perf_counter() - start
    if graphs() != compiled:
        raise ValueError(
            f"{contender.label}: torch compiled something inside a timed call, so its time means nothing: "
            "please report this, with the command; without --compile there is nothing to compile"
        )
    if patch and patch.times.known:
        known = {part: patch.times.seconds[part] - before[part] for part in PARTS}
        spent = {**known}
        if not whole and contender.steps_per_plan > 1:
            seconds -= known["plan"]
    return Run(
        size=size,
        method=contender.method,
        ratio=contender.ratio,
        round=number,
        seconds=seconds,
        plan_seconds=spent["plan"],
        merge_seconds=spent["merge"],
        unmerge_seconds=spent["unmerge"],
        peak_bytes=peak(device),
        level_bytes=level,
    )


def graphs() -> int:
    """The number of graphs that torch has compiled so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def reset_peak(device: torch.device) -> int:
    """Reset the peak memory, and return the bytes in use now: on a GPU, or else by this process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if os.access("/proc/self/clear_refs", os.W_OK):
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that malloc still holds would count as in use
        Path("/proc/self/clear_refs").write_text("5")
    return peak(device)


def peak(device: torch.device) -> int:
    """The peak memory in bytes since `reset_peak`; 0 where it can't be measured."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
