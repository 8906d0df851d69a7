"""Forecast the model's output in steps that don't run from the steps that did.

In deterministic sampling the output changes smoothly from step to step, so it can be extrapolated from a few
points. Each call of a step (guidance may make several) has a history of its own outputs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

PARABOLA = 0.5  # share of the way from the line through two points to the parabola through three


@dataclass(frozen=True)
class Point:
    """An output of the model: its values in fp32, and what is needed to build another output of that form."""

    step: int
    values: dict[int, Tensor]  # floating-point tensors, by index among the leaves
    leaves: list[Any]  # the output's other leaves, and the dtypes of the tensors in `values`
    form: TreeSpec  # the structure of the output: a tuple, a list, or a diffusers output class

    @classmethod
    def of(cls, step: int, output: Any) -> Point:
        leaves, form = tree_flatten(output)
        # copied, since the caller may modify the output in place
        values = {
            i: leaf.detach().to(torch.float32, copy=True)
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        }
        others = [leaf.dtype if i in values else leaf for i, leaf in enumerate(leaves)]
        return cls(step, values, others, form)

    def fits(self, other: Point) -> bool:
        shapes, others = ({i: x.shape for i, x in point.values.items()} for point in (self, other))
        return self.form == other.form and shapes == others

    def with_values(self, values: dict[int, Tensor]) -> Any:
        """An output of the same form with these values."""
        leaves = [_as(values[i], leaf) if i in values else leaf for i, leaf in enumerate(self.leaves)]
        return tree_unflatten(leaves, self.form)


class History:
    """The last outputs of one call of a step, oldest first."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=3)
        self.may_repeat = False  # the output of the first step may be used again

    @property
    def ready(self) -> bool:
        """Whether there are two points, or that of the first step, and it may be repeated."""
        return len(self._points) >= 2 or (self.may_repeat and any(point.step == 0 for point in self._points))

    def add(self, step: int, output: Any) -> None:
        point = Point.of(step, output)
        if self._points and not point.fits(self._points[-1]):
            self._points.clear()
        self._points.append(point)

    def tensors(self) -> list[Tensor]:
        return [value for point in self._points for value in point.values.values()]

    def forecast(self, step: int) -> Any:
        """The output at a later step, in the form of the last one."""
        weights = extrapolation([point.step for point in self._points], step)
        last = self._points[-1]
        values = {}
        for i, newest in last.values.items():
            values[i] = newest * weights[-1]
            for point, weight in zip(self._points, weights[:-1]):
                values[i].add_(point.values[i], alpha=weight)
        return last.with_values(values)


def extrapolation(steps: list[int], step: int) -> list[float]:
    """The weights with which outputs at up to three `steps` add up to the forecast at a later `step`.

    A single point is repeated. With two, the forecast is on the line through them. With three, it goes part
    of the way from the line through the last two to the parabola through all: `PARABOLA`, or less if it
    reaches farther than the points' spacing, since extrapolating a parabola far beyond closely spaced points
    does harm.
    """
    if len(steps) == 1:
        return [1.0]
    before, last = steps[-2:]
    reach = (step - last) / (last - before)
    line = [-reach, 1 + reach]
    if len(steps) == 2:
        return line
    first = steps[0]
    spacing = (last - first) / 2
    bend = PARABOLA * min(1.0, spacing / (step - last)) * (step - last) * (step - before)
    # the parabola adds `bend` times the second divided difference of the three points
    curvature = [
        1 / ((first - before) * (first - last)),
        1 / ((before - first) * (before - last)),
        1 / ((last - first) * (last - before)),
    ]
    return [bend * curve + straight for curve, straight in zip(curvature, [0.0, *line])]


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in this dtype, clamped, since extrapolated values may exceed the range of fp16."""
    limits = torch.finfo(dtype)
    return values.clamp_(limits.min, limits.max).to(dtype)
