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
TRUST = 2.0  # squared errors of forecasts by way of images count for half
TINY = 1e-30


@dataclass(frozen=True)
class Point:
    """An output of the model, the clean images that it stands for, and what else an output of that form has.

    The output may be a tuple, a list or a class of diffusers; tensors are by their index among its leaves.
    """

    step: int
    outputs: dict[int, Tensor]  # its floating-point tensors, in fp32
    images: dict[int, Tensor]  # one for each of them
    leaves: list[Any]  # the other leaves, and the dtypes of those in `outputs`
    form: TreeSpec  # the structure of the output

    @classmethod
    def of(cls, step: int, output: Any, noisy: NoisyInput) -> Point:
        leaves, form = tree_flatten(output)
        # copied, since the caller may modify the output in place
        outputs = {
            i: leaf.detach().to(torch.float32, copy=True)
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        }
        images = {i: noisy.image(i, value) for i, value in outputs.items()}
        others = [leaf.dtype if i in outputs else leaf for i, leaf in enumerate(leaves)]
        return cls(step, outputs, images, others, form)

    def fits(self, other: Point) -> bool:
        shapes, others = ({i: x.shape for i, x in point.outputs.items()} for point in (self, other))
        return self.form == other.form and shapes == others

    def with_outputs(self, outputs: dict[int, Tensor]) -> Any:
        """An output of the same form with these values."""
        leaves = [_as(outputs[i], leaf) if i in outputs else leaf for i, leaf in enumerate(self.leaves)]
        return tree_unflatten(leaves, self.form)


class History:
    """The last outputs of one call of a step, oldest first.

    Outputs are forecast by way of the clean images that they stand for, and as they are. The latter is closer
    where a pipeline does something of its own to outputs, so that they are not what its scheduler takes them
    for. Each output of the model tells how far off either is, sample by sample, and the next forecast is a
    mean of both, weighted by their squared errors.
    """

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=3)
        self._by_image: dict[int, Tensor] = {}  # the share of forecasts by way of images, [B, 1, ...]
        self.hold = False  # repeat the last clean image instead of extrapolating
        self.steps: int | None = None  # of the generation, if known
        self.may_repeat = False  # the output of the first step may be used again

    @property
    def ready(self) -> bool:
        """Whether there are two points, or that of the first step, and it may be repeated."""
        return len(self._points) >= 2 or (self.may_repeat and any(point.step == 0 for point in self._points))

    def add(self, step: int, output: Any, noisy: NoisyInput = PLAIN) -> None:
        point = Point.of(step, output, noisy)
        if self._points and not point.fits(self._points[-1]):
            self._points.clear()
        self._by_image = {}
        if self._points and noisy.known:  # else both are the same
            by_image, as_they_are = self._forecasts(step, noisy)
            for i, true in point.outputs.items():
                errors = _error(by_image[i], true), TRUST * _error(as_they_are[i], true)
                self._by_image[i] = errors[1] / (errors[0] + errors[1]).clamp(min=TINY)
        self._points.append(point)

    def tensors(self) -> list[Tensor]:
        return [x for point in self._points for x in (*point.outputs.values(), *point.images.values())]

    def forecast(self, step: int, noisy: NoisyInput = PLAIN) -> Any:
        """The output at a later step, in the form of the last one; `noisy` is the input at that step."""
        by_image, as_they_are = self._forecasts(step, noisy)
        for i, share in self._by_image.items():
            by_image[i] = torch.lerp(as_they_are[i], by_image[i], share)
        return self._points[-1].with_outputs(by_image)

    def _forecasts(self, step: int, noisy: NoisyInput) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Outputs by way of clean images, and outputs as they are."""
        points = list(self._points)[-1:] if self.hold else list(self._points)
        ran = [point.step for point in points]
        plain_weights = extrapolation(ran, step)
        weights = extrapolation(ran, step, self.steps) if noisy.known else plain_weights
        by_image, as_they_are = {}, {}
        for i in points[-1].outputs:
            image = _weighted([point.images[i] for point in points], weights)
            by_image[i] = noisy.output(i, image)
            as_they_are[i] = _weighted([point.outputs[i] for point in points], plain_weights)
        return by_image, as_they_are


def _weighted(tensors: list[Tensor], weights: list[float]) -> Tensor:
    total = tensors[-1] * weights[-1]
    for tensor, weight in zip(tensors[:-1], weights):
        total.add_(tensor, alpha=weight)
    return total


def _error(forecast: Tensor, true: Tensor) -> Tensor:
    """The squared error of each sample, [B, 1, ...]."""
    square = (forecast - true).square()
    return square.sum(tuple(range(1, square.ndim)), keepdim=True) if square.ndim > 1 else square


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
