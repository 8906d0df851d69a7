"""A kernel with its arguments: to be run, to be run again, or to be compiled for a GPU that isn't here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

# from this version on, a compiled kernel takes the same arguments as the function that it was compiled from
REPEATABLE = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)


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

    def run(self) -> Any:
        """Returns the compiled kernel; None from the interpreter, which compiles nothing."""
        first = next(value for value in self.arguments.values() if isinstance(value, Tensor))
        with torch.cuda.device_of(first):  # Triton launches on the current device, whatever it is given
            return self.kernel[self.grid](**self.arguments, **self.options)


class Repeat:
    """A launch to be made again with other tensors of the same traits, without looking at all else again.

    Triton's own way to a launch binds and inspects some thirty arguments, which takes the host longer than
    torch takes for a whole operation.
    """

    def __init__(self, launch: Launch, compiled: Any, varying: tuple[str, ...]) -> None:
        names = launch.kernel.arg_names
        self.values = [launch.arguments[name] for name in names]
        self.places = [names.index(name) for name in varying]
        # tensors of the first launch must not be held on to
        for place in self.places:
            self.values[place] = None
        self.device = launch.arguments[varying[-1]].device.index
        self.launcher = compiled[(*launch.grid, 1, 1)[:3]]

    def run(self, tensors: tuple[Tensor | None, ...]) -> None:
        if torch.cuda.current_device() == self.device:
            self.launcher(*self.arguments(tensors))
        else:
            with torch.cuda.device(self.device):
                self.launcher(*self.arguments(tensors))

    def arguments(self, tensors: tuple[Tensor | None, ...]) -> list[Any]:
        values = self.values.copy()
        for place, tensor in zip(self.places, tensors):
            values[place] = tensor
        return values


Repeats = dict[Any, Repeat]


def run(
    repeats: Repeats | None,
    kind: str,
    varying: tuple[str, ...],
    tensors: tuple[Tensor | None, ...],
    launch: Callable[[], Launch],
) -> None:
    """Launch, or repeat the launch that was made for tensors of the same traits."""
    if repeats is None or not REPEATABLE:
        launch().run()
        return
    key = (kind, *map(traits, tensors))
    known = repeats.get(key)
    if known is not None:
        known.run(tensors)
        return
    first = launch()
    compiled = first.run()
    if compiled is not None:
        repeats[key] = Repeat(first, compiled, varying)


def traits(x: Tensor | None) -> Any:
    """All of a tensor that the arguments of a launch, and what Triton compiles for them, depend on."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16)


def block(size: int) -> int:
    """The side of a block that holds so many: a power of two, and enough for a tensor core."""
    return max(16, triton.next_power_of_2(size))
