"""A kernel with its arguments: to be run, or to be compiled for a GPU that isn't here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Launch:
    kernel: Any  # what triton.jit made of a function
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # by the names of the kernel's parameters
    warps: int

    @property
    def options(self) -> dict[str, Any]:
        # a * b + c rounded once is faster and more exact; from Triton 3.10 on it has to be asked for
        return {"num_warps": self.warps, "enable_fp_fusion": True}

    def run(self) -> None:
        first = next(value for value in self.arguments.values() if isinstance(value, Tensor))
        with torch.cuda.device_of(first):  # Triton launches on the current device, whatever it is given
            self.kernel[self.grid](**self.arguments, **self.options)


def block(size: int) -> int:
    """The side of a block that holds so many: a power of two, and enough for a tensor core."""
    return max(16, triton.next_power_of_2(size))


def probe(device: torch.device) -> None:
    """Launch something, or fail for the reason why nothing can be."""
    Launch(_touch, (1,), {"x": torch.empty(1, device=device)}, warps=1).run()


@triton.jit
def _touch(x):
    tl.store(x, 0.0)
