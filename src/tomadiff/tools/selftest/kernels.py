"""Compare each kernel with core, in every dtype and kind of shape, and measure the host time of a launch."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from tomadiff.core import MergePlan, Plan, make_plan, partition, slot_layout
from tomadiff.errors import reason
from tomadiff.methods import PlanSettings, toma
from tomadiff.runtime.machine import wait_for

from .finding import Finding, dtypes_of, name_of
from .pictures import kernels_set_to

# grid, kind of region, size of region, ratio, channels, and whether unmerging is by regression; the last have
# the largest regions whose weights a program can make, and the largest that it can hold
SHAPES: dict[str, tuple[tuple[int, ...], str, int | tuple[int, int], float, int, bool | None]] = {
    "whole tiles": ((64, 64), "tile", 8, 0.5, 640, True),
    "ragged tiles": ((61, 107), "tile", 8, 0.5, 320, True),
    "video": ((3, 30, 52), "tile", 8, 0.25, 128, True),
    "stripes": ((50, 33), "stripe", 8, 0.5, 70, False),
    "tiles of 128 tokens": ((32, 48), "tile", (8, 16), 0.5, 64, True),
    "tiles of 256 tokens": ((32, 48), "tile", 16, 0.5, 64, None),
}
WARM_UP, LAUNCHES = 3, 200  # number of launches before those that are timed, and of these
ENOUGH_US = 15.0  # acceptable host time per launch; with more, the host may become slower than the device
ENOUGH_FOR_A_PLAN_US = 30.0  # the same with all that belongs to a plan


def kernels_equal_core(device: torch.device) -> Iterator[Finding]:
    """Kernels choose destinations as good as core's, and weigh, merge and unmerge the same up to rounding."""
    if missing := no_kernels(device):
        yield Finding("kernels", None, missing)
        return
    for dtype in dtypes_of(device):
        name = f"kernels in {name_of(dtype)}"
        try:
            from tomadiff.kernels.probe import difference

            found = {name: difference(device, dtype, *shape) for name, shape in SHAPES.items()}
            wrong = [f"{shape}: they {told}" for shape, told in found.items() if told]
        except Exception as error:
            wrong = [reason(error)]
        yield Finding(name, not wrong, "; ".join(wrong) or f"as core, on {', '.join(SHAPES)}")


def time_of_a_launch(device: torch.device) -> Iterator[Finding]:
    """Host time in microseconds for a plan's new weights, merging and unmerging, with a kernel and with core.

    Each with a plan that is new, as by default in every step: a launch must be repeated for another plan.
    """
    if missing := no_kernels(device):
        yield Finding("host time of a launch", None, missing)
        return
    from tomadiff.kernels.launch import REPEATABLE
    from tomadiff.kernels.plan import Fused

    x = torch.randn(2, 4096, 640, device=device, dtype=torch.float16)
    settings = PlanSettings(unmerge="regression")
    regions = partition((64, 64), settings.regions, settings.region_size, False, device)
    plan = make_plan(x, regions, slot_layout(regions.lengths, 0.5, device), settings.scale, settings.unmerge)
    merged = plan.merge(x)
    todo: dict[str, tuple[Callable[[MergePlan], object], float]] = {
        "a plan's new weights": (
            lambda plan: toma.plan(x, (64, 64), 0.5, settings, destinations=plan.destinations),
            ENOUGH_FOR_A_PLAN_US,
        ),
        "merging": (lambda plan: plan.merge(x), ENOUGH_US),
        "unmerging": (lambda plan: plan.unmerge(merged, x, merged), ENOUGH_US),
    }
    for name, (launch, enough) in todo.items():
        with kernels_set_to("0"):
            core = _microseconds(launch, _new_plans(plan), device)
        with kernels_set_to("1"):  # else core may make the weights, and its time would be the kernel's
            kernel = _microseconds(launch, [Fused(new) for new in _new_plans(plan)], device)
        words = (
            f"{kernel:.1f} us by a kernel, {core:.1f} us by torch's operations, at most {enough:g} is good"
        )
        old = "" if REPEATABLE else "; from Triton 3.3 on, it is less"
        good = kernel <= enough if REPEATABLE else None
        figures = {"kernel_us": kernel, "core_us": core}
        yield Finding(f"host time of a launch, {name}", good, words + old, figures)


def _new_plans(plan: Plan) -> list[Plan]:
    """As many plans as are launched; their weights are copies, eight of which are enough."""
    copies = [(plan.merging.clone(), plan.unmerging.clone()) for _ in range(8)]
    return [
        replace(plan, merging=merging, unmerging=unmerging)
        for merging, unmerging in (copies[i % 8] for i in range(WARM_UP + LAUNCHES))
    ]


def no_kernels(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "kernels run on CUDA; here core does the work"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'tomadiff[kernels]'): core does the work, slower"
    return None


def _microseconds(
    launch: Callable[[MergePlan], object], plans: Sequence[MergePlan], device: torch.device
) -> float:
    for plan in plans[:WARM_UP]:
        launch(plan)
    wait_for(device)
    start = time.perf_counter()
    for plan in plans[WARM_UP:]:
        launch(plan)
    spent = time.perf_counter() - start
    wait_for(device)
    return 1e6 * spent / (len(plans) - WARM_UP)
