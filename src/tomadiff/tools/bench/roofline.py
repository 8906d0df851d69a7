"""Predict times on GPUs that are not at hand, with a roofline model, kernel by kernel.

A kernel takes as long as its arithmetic or its memory traffic, whichever is longer, but at least a minimum
time. The host launches kernels ahead of the device, so both work at the same time, and a call takes as long
as the slower of the two.

This is a model, not a measurement. It ignores caches, and that small matrices don't fill a large GPU, so it
is too optimistic on the largest GPUs. Its constants are round numbers, not fitted. For dense calls, it agrees
with published times within a third (they are in `tests/tools/test_bench_count.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .count import Counts, Op


@dataclass(frozen=True)
class Device:
    """Published peak figures of a device, and the share of them that is reached in practice."""

    name: str
    tflops: float  # for matrix products in half precision, accumulated in fp32, without sparsity
    tflops_fp32: float  # for matrix products in fp32; by default, PyTorch doesn't use TF32 for them
    bandwidth: float  # GB/s
    # Shares of the peaks that are reached. Large matrix products reach 0.7 to 0.8, small ones less. Attention
    # reaches 0.5 to 0.7 in FlashAttention-2's paper (A100), and 0.35 with FlashAttention-2 in
    # FlashAttention-3's paper (H100).
    matmul: float = 0.6
    attention: float = 0.4
    memory: float = 0.8
    # Host time per launch in eager mode, including Python, modules and views. Tiny models as deep as SDXL and
    # Flux take 29 and 16 us per launch on one core of a 2.8 GHz server, kernels included, and workstation
    # cores are about twice as fast. With CUDA graphs it is close to 0.
    launch_us: float = 10.0
    kernel_us: float = 2.0  # minimum time of a kernel on the device


# From NVIDIA's data sheets. The paper's GPUs are "RTX6000", "V100" and "RTX8000". The Quadro RTX 6000 and
# 8000 are one chip with 24 and 48 GB, and Flux alone takes 24 GB, so its RTX6000 may well be the Ada one.
DEVICES = {
    # FlashAttention-2 doesn't support these two, and PyTorch's other fused attention is slower
    "rtx6000": Device("Quadro RTX 6000, 8000", tflops=130.5, tflops_fp32=16.3, bandwidth=672, attention=0.25),
    "v100": Device("V100 SXM2", tflops=125, tflops_fp32=15.7, bandwidth=900, attention=0.25),
    "rtx6000-ada": Device("RTX 6000 Ada", tflops=364.2, tflops_fp32=91.1, bandwidth=960),
    "l40s": Device("L40S", tflops=362, tflops_fp32=91.6, bandwidth=864),
    "rtx4090": Device("RTX 4090", tflops=165.2, tflops_fp32=82.6, bandwidth=1008),
    "a100": Device("A100 SXM 80 GB", tflops=312, tflops_fp32=19.5, bandwidth=2039),
    "h100": Device("H100 SXM", tflops=989.4, tflops_fp32=66.9, bandwidth=3350),
}


class Prediction(NamedTuple):
    """Predicted seconds per call."""

    dense: float
    merged: float

    @property
    def speedup(self) -> float:
        return self.dense / self.merged

    @property
    def saving(self) -> float:
        """The share of the time that is saved."""
        return 1 - self.merged / self.dense


def predict(dense: Counts, merged: Counts, device: Device) -> Prediction:
    """Predict the times of a dense and a merged call from their counts (for merged: `Cycle.per_step`)."""
    return Prediction(seconds(dense, device), seconds(merged, device))


def seconds(counts: Counts, device: Device) -> float:
    """The time of a call in seconds."""
    host = len(counts.ops) * device.launch_us * 1e-6
    return max(host, sum(kernel_seconds(op, device) for op in counts.ops)) / counts.calls


def kernel_seconds(op: Op, device: Device) -> float:
    """The time of one kernel on the device, in seconds."""
    peak = device.tflops_fp32 if op.dtype == torch.float32 else device.tflops
    reached = device.attention if op.name == "attention" else device.matmul
    arithmetic = op.flops / (peak * 1e12 * reached)
    traffic = op.bytes / (device.bandwidth * 1e9 * device.memory)
    return max(arithmetic, traffic, device.kernel_us * 1e-6)


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
        matmul=1.0,
        attention=attention / product,
        memory=1.0,
        launch_us=0.0,  # the host itself is the device
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
