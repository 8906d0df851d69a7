"""Predict times on GPUs that are not at hand, with a roofline model, kernel by kernel.

A kernel takes as long as its arithmetic or its memory traffic, whichever is longer, but at least a minimum
time. Products are computed in tiles, as many at a time as the GPU has multiprocessors; a last wave of few
tiles takes as long as a full one. The host launches kernels ahead of the device, so both work at the same
time, and a call takes as long as the slower of the two.

This is a model, not a measurement. It ignores caches. Its constants are round numbers, not fitted, so every
prediction is a range. For dense calls, it agrees with published times within a third (they are in
`tests/tools/test_bench_count.py`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from .count import Counts, Op

# Rows and columns of the tiles that a product is cut into, and how fast these are: small ones load more data
# for the same arithmetic. The fastest choice is assumed, as cuBLAS tries to make it.
TILES = ((256, 128, 1.0), (128, 128, 0.95), (64, 64, 0.7))
ATTENTION_ROWS = 128  # queries that FlashAttention gives to a multiprocessor at a time


@dataclass(frozen=True)
class Device:
    """Published peak figures of a device, and the share of them that is reached in practice."""

    name: str
    tflops: float  # for matrix products in half precision, accumulated in fp32, without sparsity
    tflops_fp32: float  # for matrix products in fp32; by default, PyTorch doesn't use TF32 for them
    bandwidth: float  # GB/s
    multiprocessors: int | None  # None if products are not cut into tiles
    # Shares of the peaks that are reached by full waves of tiles. Matrix products reach 0.7 to 0.8. Attention
    # reaches 0.5 to 0.7 in FlashAttention-2's paper (A100), and 0.35 with FlashAttention-2 in
    # FlashAttention-3's paper (H100).
    matmul: float = 0.65
    attention: float = 0.45
    memory: float = 0.8
    # Host time per launch in eager mode, including Python, modules and views. Tiny models as deep as SDXL and
    # Flux take 29 and 16 us per launch on one core of a 2.8 GHz server, kernels included, and workstation
    # cores are about twice as fast.
    launch_us: float = 10.0
    compiled_launch_us: float = 2.0  # the same in compiled code
    # Host time of our hooks per site and call, without launches, and of a step that does not run, as
    # benchmarks/host_time.py measures them on a server core of 2024. Compiled code has no hooks.
    hook_us: float = 7.0
    forecast_us: float = 100.0
    kernel_us: float = 2.0  # minimum time of a kernel on the device
    round_us: float = 0.5  # of a loop in a kernel in which all threads of a program wait for each other

    def bounds(self) -> tuple[Device, Device]:
        """A slow device with a fast host, which favours merging, and a fast device with a slow host."""
        return self._guess(0.8, 0.6), self._guess(1.2, 1.5)

    def _guess(self, device: float, host: float) -> Device:
        reached = {name: device * getattr(self, name) for name in ("matmul", "attention")}
        names = ("launch_us", "compiled_launch_us", "hook_us", "forecast_us")
        return replace(self, **reached, **{name: host * getattr(self, name) for name in names})


# From NVIDIA's data sheets. The paper's GPUs are "RTX6000", "V100" and "RTX8000". The Quadro RTX 6000 and
# 8000 are one chip with 24 and 48 GB, and Flux alone takes 24 GB, so its RTX6000 may well be the Ada one.
DEVICES = {
    # FlashAttention-2 doesn't support these two, and PyTorch's other fused attention is slower
    "rtx6000": Device(
        "Quadro RTX 6000, 8000",
        tflops=130.5,
        tflops_fp32=16.3,
        bandwidth=672,
        multiprocessors=72,
        attention=0.25,
    ),
    "v100": Device(
        "V100 SXM2", tflops=125, tflops_fp32=15.7, bandwidth=900, multiprocessors=80, attention=0.25
    ),
    "rtx6000-ada": Device("RTX 6000 Ada", tflops=364.2, tflops_fp32=91.1, bandwidth=960, multiprocessors=142),
    "l40s": Device("L40S", tflops=362, tflops_fp32=91.6, bandwidth=864, multiprocessors=142),
    "rtx4090": Device("RTX 4090", tflops=165.2, tflops_fp32=82.6, bandwidth=1008, multiprocessors=128),
    "a100": Device("A100 SXM 80 GB", tflops=312, tflops_fp32=19.5, bandwidth=2039, multiprocessors=108),
    "h100": Device("H100 SXM", tflops=989.4, tflops_fp32=66.9, bandwidth=3350, multiprocessors=132),
}


def seconds(counts: Counts, device: Device, compiled: bool = False) -> float:
    """The time of a call in seconds, in eager mode or compiled."""
    launched = fused(counts.ops) if compiled else counts.ops
    if compiled:  # planning, merging and unmerging are operators that the compiler leaves as they are
        ours = sum(op.phase != "model" for op in launched)
        host = ours * device.launch_us + (len(launched) - ours) * device.compiled_launch_us
    else:
        host = len(launched) * device.launch_us + counts.calls * counts.hooks * device.hook_us
    return max(1e-6 * host, sum(kernel_seconds(op, device) for op in launched)) / counts.calls


def fused(ops: Sequence[Op]) -> list[Op]:
    """The launches of compiled code: neighbours in the model that aren't products become one kernel.

    It moves as much as the largest of them, since what is between them stays in registers. What other
    packages add, such as the matching of tomesd, counts as the model's and is fused, too, although inductor
    does not fuse sorts and scatters: their compiled times are too good.
    """
    launches: list[Op] = []
    for together, group in itertools.groupby(ops, lambda op: op.phase == "model" and not op.flops):
        kernels = list(group)
        launches += [max(kernels, key=lambda op: op.bytes)] if together else kernels
    return launches


def kernel_seconds(op: Op, device: Device) -> float:
    """The time of one kernel on the device, in seconds."""
    peak = device.tflops_fp32 if op.dtype == torch.float32 else device.tflops
    reached = device.attention if op.name == "attention" else device.matmul
    arithmetic = op.flops / (peak * 1e12 * reached)
    if device.multiprocessors and op.product:
        arithmetic *= whole_waves(op, device.multiprocessors)
    traffic = op.bytes / (device.bandwidth * 1e9 * device.memory)
    waiting = op.rounds * device.round_us * 1e-6
    return max(arithmetic + waiting, traffic, device.kernel_us * 1e-6)


def whole_waves(op: Op, multiprocessors: int) -> float:
    """How much longer a product takes because tiles and waves are whole, at least 1."""
    assert op.product is not None
    batch, rows, columns = op.product
    tiles = ((ATTENTION_ROWS, columns, 1.0),) if op.name == "attention" else TILES
    factors = []
    for height, width, speed in tiles:
        count = batch * math.ceil(rows / height) * math.ceil(columns / width)
        waves = math.ceil(count / multiprocessors)
        factors.append(waves * multiprocessors * height * width / (batch * rows * columns * speed))
    return min(factors)


def cpu_device() -> Device:
    """This machine's CPU in fp32, with measured peaks: on it, predictions can be checked."""
    x, weight = torch.randn(1024, 1280), torch.randn(1280, 1280)
    product = 2 * x.numel() * weight.shape[1] / _fastest(lambda: x @ weight)
    heads = torch.randn(1, 20, 1024, 64)
    attention = (
        4
        * heads.numel()
        * heads.shape[2]
        / _fastest(lambda: F.scaled_dot_product_attention(heads, heads, heads))
    )
    source, target = torch.randn(2, 1 << 24)  # 64 MB each, larger than the caches
    copy = (source.nbytes + target.nbytes) / _fastest(lambda: target.copy_(source))
    number = torch.zeros(1)
    return Device(
        "this CPU",
        tflops=product / 1e12,
        tflops_fp32=product / 1e12,
        bandwidth=copy / 1e9,
        multiprocessors=None,
        matmul=1.0,
        attention=attention / product,
        memory=1.0,
        launch_us=0.0,  # the host itself is the device
        compiled_launch_us=0.0,
        hook_us=0.0,
        kernel_us=_fastest(lambda: number.add_(1)) * 1e6,
    )


def _fastest(run: Callable[[], object], times: int = 10) -> float:
    """The time of the fastest run in seconds: other processes can only slow a run down."""
    run()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)
