"""Forecast the model's output in steps that don't run from the steps that did.

In deterministic sampling the clean image that the model expects changes smoothly from step to step, so it
can be extrapolated from a few points. Where fresh noise comes in, it changes little, but not smoothly: there
the last one is held. Each call of a step (guidance may make several) has a history of its own outputs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .prediction import NoisyInput

PLAIN = NoisyInput()  # outputs are forecast as they are
# gaps in a generation with which forecasts are least and most bold (docs/quality.md)
GAPS = 4, 12


@dataclass(frozen=True)
class Point:
    """An output of the model: its clean images in fp32, and what is needed to build another of that form."""

    step: int
    images: dict[int, Tensor]  # for each floating-point tensor, by index among the leaves
    leaves: list[Any]  # the output's other leaves, and the dtypes of those in `images`
    form: TreeSpec  # the structure of the output: a tuple, a list, or a diffusers output class

    @classmethod
    def of(cls, step: int, output: Any, noisy: NoisyInput) -> Point:
        leaves, form = tree_flatten(output)
        # copied, since the caller may modify the output in place
        images = {
            i: noisy.image(i, leaf.detach().to(torch.float32, copy=True))
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        }
        others = [leaf.dtype if i in images else leaf for i, leaf in enumerate(leaves)]
        return cls(step, images, others, form)

    def fits(self, other: Point) -> bool:
        shapes, others = ({i: x.shape for i, x in point.images.items()} for point in (self, other))
        return self.form == other.form and shapes == others

    def with_images(self, images: dict[int, Tensor], noisy: NoisyInput) -> Any:
        """An output of the same form that stands for these clean images."""
        outputs = {i: noisy.output(i, image) for i, image in images.items()}
        leaves = [_as(outputs[i], leaf) if i in outputs else leaf for i, leaf in enumerate(self.leaves)]
        return tree_unflatten(leaves, self.form)


class History:
    """The last outputs of one call of a step, oldest first."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=3)
        self.hold = False  # repeat the last clean image instead of extrapolating
        self.steps: int | None = None  # of the generation; None: be bold
        self.may_repeat = False  # the output of the first step may be used again

    @property
    def ready(self) -> bool:
        """Whether there are two points, or that of the first step, and it may be repeated."""
        return len(self._points) >= 2 or (self.may_repeat and any(point.step == 0 for point in self._points))

    def add(self, step: int, output: Any, noisy: NoisyInput = PLAIN) -> None:
        point = Point.of(step, output, noisy)
        if self._points and not point.fits(self._points[-1]):
            self._points.clear()
        self._points.append(point)

    def tensors(self) -> list[Tensor]:
        return [image for point in self._points for image in point.images.values()]

    def forecast(self, step: int, noisy: NoisyInput = PLAIN) -> Any:
        """The output at a later step, in the form of the last one; `noisy` is the input at that step."""
        points = list(self._points)[-1:] if self.hold else list(self._points)
        weights = extrapolation([point.step for point in points], step, self.steps)
        last, images = points[-1], {}
        for i, newest in last.images.items():
            images[i] = newest * weights[-1]
            for point, weight in zip(points, weights[:-1]):
                images[i].add_(point.images[i], alpha=weight)
        return last.with_images(images, noisy)


def extrapolation(points: list[int], step: int, steps: int | None = None) -> list[float]:
    """The weights with which images at up to three steps, `points`, add up to the forecast at a later `step`.

    A single image is repeated. With two, the forecast is on the line through them. With three, it goes half
    of the way from the line through the last two to the parabola through all; or less if it reaches farther
    than their spacing, since extrapolating a parabola far beyond closely spaced points does harm.

    The fewer points a generation of so many `steps` has, the more a clean image has settled by the next one,
    and the more a forecast stays behind the line: `boldness`.
    """
    if len(points) == 1:
        return [1.0]
    before, last = points[-2:]
    bold = boldness(last - before, steps)
    reach = (1 + bold) / 2 * (step - last) / (last - before)
    line = [-reach, 1 + reach]
    if len(points) == 2:
        return line
    first = points[0]
    spacing = (last - first) / 2
    bend = bold / 2 * min(1.0, spacing / (step - last)) * (step - last) * (step - before)
    # the parabola adds `bend` times the second divided difference of the three points
    curvature = [
        1 / ((first - before) * (first - last)),
        1 / ((before - first) * (before - last)),
        1 / ((last - first) * (last - before)),
    ]
    return [bend * curve + straight for curve, straight in zip(curvature, [0.0, *line])]


def boldness(gap: int, steps: int | None) -> float:
    """From 0, half of the way along the line, to 1, all of it, by how often a gap fits into a generation."""
    if steps is None:
        return 1.0
    timid, bold = GAPS
    return min(max((steps / gap - timid) / (bold - timid), 0.0), 1.0)


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in this dtype, clamped, since extrapolated values may exceed the range of fp16."""
    limits = torch.finfo(dtype)
    return values.clamp_(limits.min, limits.max).to(dtype)
