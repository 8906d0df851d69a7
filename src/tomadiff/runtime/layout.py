"""How the tokens of a call are laid out: the image's grid, and what else is in a sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tomadiff.models import Call, Family, Site


@dataclass(frozen=True)
class Layout:
    """The grid of one call, and the tokens of reference images in front of the image's and behind."""

    finest: tuple[int, ...] = ()
    reference_tokens: tuple[int, int] = (0, 0)
    drops_odd: bool = False

    def grid(self, level: int) -> tuple[int, ...]:
        """The grid of tokens where the image is downsampled so far."""
        grid, more = self.finest, not self.drops_odd
        for _ in range(int(math.log2(level))):
            grid = tuple((side + more) // 2 for side in grid)
        return grid

    def around(self, sequence: Tensor, site: Site, tokens: int) -> tuple[int, int]:
        """How many tokens of a site's sequence are in front of the image's, and behind."""
        if sequence.shape[1] == tokens:  # the image is alone
            return 0, 0
        before, behind = self.reference_tokens
        text = sequence.shape[1] - tokens - before - behind
        return before + text * site.text_first, behind + text * site.text_last


class LayoutReader:
    """Reads layouts from the arguments of a model, as its family says."""

    def __init__(self, model: nn.Module, family: Family | None) -> None:
        self._model, self._family = model, family
        self._sources: list[Any] | None = None  # the arguments that were read last
        self._known: dict[Any, Layout] = {}  # by call of the step and shapes of arguments
        self.layout = Layout()  # the last one

    def read(self, arguments: Call, call: int = 0) -> Layout:
        """Look at the arguments that tell, unless they are the very same as in the last call.

        Reading the values of a tensor waits for its device. Pipelines make new tensors of the same values for
        each step, so those that are not on the CPU are read once in a generation, for each call of a step.
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
    """What tells arguments of different layouts apart within a generation."""
    if isinstance(source, (list, tuple)):
        return tuple(map(_shape, source))
    return source.shape if isinstance(source, Tensor) else source


def _elsewhere(source: Any) -> bool:
    """Whether reading it waits for a device."""
    return isinstance(source, Tensor) and source.device.type != "cpu"
