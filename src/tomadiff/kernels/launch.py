"""A kernel launch as an object: it can be run, repeated cheaply, or compiled for a GPU that isn't present."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from tomadiff.core import Regions, Slots

# from Triton 3.3 on, a compiled kernel takes the same arguments as the function it was compiled from
REPEATABLE = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)


@dataclass(frozen=True)
class Launch:
    kernel: Any  # a function decorated with triton.jit
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # by the names of the kernel's parameters
    warps: int

    @property
    def options(self) -> dict[str, Any]:
        # fused multiply-add is faster and rounds only once; from Triton 3.10 on it has to be requested
        return {"num_warps": self.warps, "enable_fp_fusion": True}

    def run(self) -> Any:
        """Launch the kernel and return it compiled, or None in the interpreter, which compiles nothing."""
        first = next(value for value in self.arguments.values() if isinstance(value, Tensor))
        with torch.cuda.device_of(first):  # Triton launches on the current device, not on its tensors' device
            return self.kernel[self.grid](**self.arguments, **self.options)


class Repeat:
    """A launch that can be repeated with other tensors of the same `traits`.

    Triton's own launch path binds and inspects some thirty arguments every time, which takes the host longer
    than a whole torch operation.
    """

    def __init__(self, launch: Launch, compiled: Any, varying: tuple[str, ...]) -> None:
        names = launch.kernel.arg_names
        self.values = [launch.arguments[name] for name in names]
        self.places = [names.index(name) for name in varying]
        # don't keep the tensors of the first launch alive
        for place in self.places:
            self.values[place] = None
        self.device = launch.arguments[varying[-1]].device.index
        self.launcher = compiled[(*launch.grid, 1, 1)[:3]]

    def run(self, *tensors: Tensor | None) -> None:
        if torch.cuda.current_device() == self.device:
            self.launcher(*self.arguments(*tensors))
        else:
            with torch.cuda.device(self.device):
                self.launcher(*self.arguments(*tensors))

    def arguments(self, *tensors: Tensor | None) -> list[Any]:
        values = self.values.copy()
        for place, tensor in zip(self.places, tensors):
            values[place] = tensor
        return values


Repeats = dict[Any, Repeat]


@lru_cache(maxsize=64)  # as many as `partition` and `slot_layout` keep
def repeats_of(regions: Regions, slots: Slots) -> Repeats:
    """The launches with these regions and slots, in all plans: by default, every step has a new plan."""
    return {}


def run(
    repeats: Repeats | None,
    kind: Hashable,
    varying: tuple[str, ...],
    inputs: tuple[Tensor | None, ...],
    outputs: tuple[Tensor, ...],
    launch: Callable[[], Launch],
) -> None:
    """Repeat an earlier launch with inputs of the same traits, or make and keep a new one.

    varying: the names of inputs and outputs among the launch's arguments. The outputs are new tensors whose
    own traits follow from the inputs'.
    """
    if repeats is None or not REPEATABLE:
        launch().run()
        return
    key = (kind, *map(traits, inputs))
    known = repeats.get(key)
    if known is not None:
        known.run(*inputs, *outputs)
        return
    first = launch()
    compiled = first.run()
    if compiled is not None:
        repeats[key] = Repeat(first, compiled, varying)


def traits(x: Tensor | None) -> Any:
    """Everything about a tensor that launch arguments and Triton's specialisation depend on."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16)
