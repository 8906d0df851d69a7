"""What the kernels take of a GPU, as compiled for it ahead of time, and of the host; neither needs a GPU.

python benchmarks/kernel_resources.py
"""

from __future__ import annotations

import contextlib
import io
import re
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from tomadiff import kernels
from tomadiff.core import Plan, partition, slot_layout
from tomadiff.kernels import plan as by_kernels
from tomadiff.kernels.launch import Launch, repeats_of
from tomadiff.kernels.merge import merge_launch, unmerge_launch
from tomadiff.kernels.plan import Fused
from tomadiff.kernels.select import destinations_launch
from tomadiff.kernels.weights import weights, weights_launch
from tomadiff.methods import PlanSettings, toma

CPU = torch.device("cpu")
KERNELS = ("destinations", "weights", "merge", "unmerge")
# KB that a program can have, by compute capability: V100, T4 and RTX 20, A100, RTX 30, RTX 40 and L40, H100,
# B200, RTX 50
SHARED = {70: 96, 75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


@dataclass(frozen=True)
class Compiled:
    ptx: str
    cubin: bytes
    registers: int  # of a thread
    spilled: int  # bytes of a thread's registers that had to go to memory, stores and loads
    shared: int  # bytes of a program


def compile_for(capability: int, launch: Launch) -> Compiled:
    """Compile what a launch with these arguments would compile on such a GPU."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        kind = "constexpr" if parameter.is_constexpr else mangle_type(value, specialize=True)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif (value.data_ptr() if isinstance(value, Tensor) else value) % 16 == 0:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True  # the log isn't kept
        target = GPUTarget("cuda", capability, 32)
        kernel = triton.compile(source, target, launch.options)
    return Compiled(
        ptx=kernel.asm["ptx"],
        cubin=kernel.asm["cubin"],
        registers=int(re.search(r"Used (\d+) registers", log.getvalue())[1]),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill", log.getvalue()))),
        shared=kernel.metadata.shared,
    )


def launches(
    grid: tuple[int, ...],
    size: int | tuple[int, ...],
    channels: int,
    dtype: torch.dtype,
    ratio: float = 0.5,
    regression: bool = True,
) -> dict[str, Launch]:
    """What a block of such tokens in tiles of such a size launches for two samples."""
    plan, x, y = tensors(grid, size, channels, dtype, ratio)
    regions, slots = plan.regions, plan.slots
    scratch = torch.empty(len(plan.merging), 1, 1)  # only its type matters
    matrices = (x, plan.destinations, plan.merging.float(), plan.merging, plan.merging, scratch)
    made = (
        destinations_launch(x, regions, slots, plan.destinations),
        weights_launch(regions, slots, 1000.0, regression, matrices),
        merge_launch(plan, x, y),
        unmerge_launch(plan, y, x, y, x),
    )
    return dict(zip(KERNELS, made))


def tensors(
    grid: tuple[int, ...],
    size: int | tuple[int, ...],
    channels: int,
    dtype: torch.dtype,
    ratio: float = 0.5,
) -> tuple[Plan, Tensor, Tensor]:
    """A plan, tokens and merged tokens, with whatever the memory holds."""
    regions = partition(grid, "tile", size, False, CPU)
    places = slot_layout(regions.lengths, ratio, CPU)
    x = torch.empty(2, regions.tokens, channels, dtype=dtype)
    y = torch.empty(2, places.kept, channels, dtype=dtype)
    chosen = torch.empty(2, places.kept, dtype=torch.long)
    weights = torch.empty(2 * regions.count, places.size, regions.size, dtype=dtype)
    return Plan(regions, places, chosen, weights, weights, weights.transpose(1, 2)), x, y


class Nothing:
    """In the place of a compiled kernel: launching it does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *values: None


@contextlib.contextmanager
def launching_nothing() -> Iterator[None]:
    """On the CPU, take the way of tensors on CUDA, up to the driver: results are whatever memory holds."""
    choose = by_kernels.destinations
    repeats_of.cache_clear()
    with (
        mock.patch.object(Launch, "run", lambda launch: Nothing()),
        mock.patch.object(torch.cuda, "current_device", lambda: None),  # as of tensors on the CPU
        mock.patch.object(kernels, "works", lambda *program: True),
        mock.patch.object(Tensor, "is_cuda", True),
        mock.patch.object(by_kernels, "destinations", lambda *given: choose(*given).zero_()),
    ):
        yield
    repeats_of.cache_clear()


def host_microseconds() -> dict[str, float]:
    """Host time of each kernel's launch when it is repeated, without the driver's own, and of new weights."""
    plan, x, y = tensors((64, 64), 8, 640, torch.float16)
    fused, layout, settings = Fused(plan), (plan.regions, plan.slots), PlanSettings(unmerge="regression")
    choose = by_kernels.destinations
    with launching_nothing():
        calls = {
            "destinations": lambda: choose(x, *layout),
            "weights": lambda: weights(x, *layout, plan.destinations, 1000.0, True),
            "a plan with new weights": lambda: toma.plan(
                x, (64, 64), 0.5, settings, destinations=plan.destinations
            ),
            "merge": lambda: fused.merge(x),
            "unmerge": lambda: fused.unmerge(y, x, y),
        }
        return {
            name: 1e6 * min(timeit.repeat(call, number=1000, repeat=30)) / 1000
            for name, call in calls.items()
        }


def main() -> None:
    for name, spent in host_microseconds().items():
        print(f"{name}: {spent:.1f} us of the host for a launch that is repeated")
    print("\nregisters of a thread / KB of shared memory / bytes spilled\n")
    print(f"| kernel | threads | {' | '.join(f'sm_{capability}' for capability in SHARED)} |")
    print("|---|--:" + "|--:" * len(SHARED) + "|")
    for title, names, *case in (
        ("64 tokens, fp16", KERNELS, (64, 64), 8, 640, torch.float16),
        ("ragged tiles, fp16", KERNELS, (60, 107), 8, 640, torch.float16),
        ("64 tokens, bf16", KERNELS, (64, 64), 8, 3072, torch.bfloat16),
        ("64 tokens, fp32", KERNELS, (64, 64), 8, 640, torch.float32),
        ("64 tokens, ratio 0.25, fp16", KERNELS[1:2], (64, 64), 8, 640, torch.float16, 0.25),
        ("64 tokens, ratio 0.25, fp32", KERNELS[1:2], (64, 64), 8, 640, torch.float32, 0.25),
        ("128 tokens, fp16", KERNELS[:2], (64, 64), (8, 16), 640, torch.float16),
        (
            *("128 tokens, ratio 0.25, transposed, fp32", KERNELS[1:2]),
            *((64, 64), (8, 16), 640, torch.float32, 0.25, False),
        ),
        ("256 tokens, fp16", KERNELS[:1], (64, 64), 16, 640, torch.float16),
    ):
        for kernel in names:
            launch = launches(*case)[kernel]
            made = [compile_for(capability, launch) for capability in SHARED]
            cells = [f"{one.registers} / {one.shared / 1024:.0f} / {one.spilled}" for one in made]
            print(f"| {kernel}: {title} | {32 * launch.warps} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
