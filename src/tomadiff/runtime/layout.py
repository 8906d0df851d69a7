"""The layout of a call's tokens: the image's grid, and the other tokens in a sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tomadiff.models import Call, Family, Site


@dataclass(frozen=True)
class Layout:
    """The grid of one call, and the number of reference tokens around the image's."""

    finest: tuple[int, ...] = ()  # the grid at full resolution; empty if nothing is merged
    reference_tokens: tuple[int, int] = (0, 0)  # tokens of reference images before and after the image's
    drops_odd: bool = False  # downsampling rounds odd sides down instead of up

    def grid(self, level: int) -> tuple[int, ...]:
        """The grid of tokens where the image is downsampled by this factor."""
        grid, more = self.finest, not self.drops_odd
        for _ in range(int(math.log2(level))):
            grid = tuple((side + more) // 2 for side in grid)
        return grid

    def around(self, sequence: Tensor, site: Site, tokens: int) -> tuple[int, int]:
        """How many tokens of a site's sequence come before and after the image's."""
        if sequence.shape[1] == tokens:  # the sequence has no other tokens
            return 0, 0
        before, behind = self.reference_tokens
        text = sequence.shape[1] - tokens - before - behind
        return before + text * site.text_first, behind + text * site.text_last


class LayoutReader:
    """Reads layouts from a model's arguments, as its family declares."""

    def __init__(self, model: nn.Module, family: Family | None) -> None:
        self._model, self._family = model, family
        self._sources: list[Any] | None = None  # the arguments that were read last
        self._known: dict[Any, Layout] = {}  # by call of the step and shapes of arguments
        self.layout = Layout()  # the last one

    def read(self, arguments: Call, call: int = 0) -> Layout:
        """Read the arguments that determine the layout, unless they are the same objects as in the last call.

        Reading a tensor's values synchronises its device. Pipelines make new tensors with the same values for
        each step, so those that are not on the CPU are read once per generation, for each call of a step.
        """
        family = self._family
        if family is None:
            return self.layout
        names = [family.grid_from] if isinstance(family.grid_from, str) else family.grid_from
        sources = [arguments.get(name) for name in names]
        if self._sources is None or any(a is not b for a, b in zip(sources, self._sources)):
            key = (call, *map(_shape, sources))
            if key not in self._known or not any(map(_elsewhere, sources)):
                self._known[key] = Layout(
                    family.grid(self._model, *sources),
                    family.reference_tokens(self._model, *sources),
                    family.drops_odd,
                )
            self.layout, self._sources = self._known[key], sources
        return self.layout


def _shape(source: Any) -> Any:
    """A key that distinguishes arguments of different layouts within a generation."""
    if isinstance(source, (list, tuple)):
        return tuple(map(_shape, source))
    return source.shape if isinstance(source, Tensor) else source


def _elsewhere(source: Any) -> bool:
    """Whether reading this argument synchronises a device."""
    return isinstance(source, Tensor) and source.device.type != "cpu"
