"""Compare each kernel with core, in every dtype and kind of shape, and measure the host time of a launch."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator

import torch

from tomadiff.core import partition
from tomadiff.runtime.machine import wait_for

from .finding import Finding, dtypes_of, name_of

# grid, kind of region, size of region, channels; the last has the largest regions that a program can hold
SHAPES: dict[str, tuple[tuple[int, ...], str, int, int]] = {
    "whole tiles": ((64, 64), "tile", 8, 640),
    "ragged tiles": ((61, 107), "tile", 8, 320),
    "video": ((3, 30, 52), "tile", 8, 128),
    "stripes": ((50, 33), "stripe", 8, 70),
    "tiles of 256 tokens": ((32, 48), "tile", 16, 64),
}
LAUNCHES = 200  # number of launches that are timed
ENOUGH_US = 30.0  # acceptable host time per launch; with more, the host may become slower than the device


def kernels_equal_core(device: torch.device) -> Iterator[Finding]:
    """Kernels choose destinations as good as core's, and merge and unmerge the same up to rounding."""
    if reason := _no_kernels(device):
        yield Finding("kernels", None, reason)
        return
    for dtype in dtypes_of(device):
        name = f"kernels in {name_of(dtype)}"
        try:
            from tomadiff.kernels.probe import difference

            found = {name: difference(device, dtype, *shape) for name, shape in SHAPES.items()}
            wrong = [f"{shape}: they {told}" for shape, told in found.items() if told]
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        yield Finding(name, not wrong, "; ".join(wrong) or f"as core, on {', '.join(SHAPES)}")


def time_of_a_launch(device: torch.device) -> Iterator[Finding]:
    """Host time in microseconds for merging at one site, with a kernel and with core."""
    if reason := _no_kernels(device):
        yield Finding("host time of a launch", None, reason)
        return
    from tomadiff.kernels.merge import merge
    from tomadiff.kernels.probe import core_plan

    x = torch.randn(2, 4096, 640, device=device, dtype=torch.float16)
    plan = core_plan(x, partition((64, 64), "tile", 8, False, device))
    core = _microseconds(lambda: plan.merge(x), device)
    repeats: dict = {}
    kernel = _microseconds(lambda: merge(plan, x, repeats), device)
    yield Finding(
        "host time of a launch",
        kernel <= ENOUGH_US,
        f"{kernel:.1f} us for merging by a kernel, {core:.1f} us by torch's operations",
        {"kernel_us": kernel, "core_us": core},
    )


def _no_kernels(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "kernels run on CUDA; here core does the work"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'tomadiff[kernels]'): core does the work, slower"
    return None


def _microseconds(launch: Callable[[], object], device: torch.device) -> float:
    for _ in range(3):
        launch()
    wait_for(device)
    start = time.perf_counter()
    for _ in range(LAUNCHES):
        launch()
    spent = time.perf_counter() - start
    wait_for(device)
    return 1e6 * spent / LAUNCHES
