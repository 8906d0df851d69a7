"""How the tokens of a call are laid out: the picture's grid, and what else is in a sequence."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from tomadiff.models import Call, Family, Site


class Layout:
    """Of one model, as its family reads it from the arguments of a call."""

    def __init__(self, model: nn.Module, family: Family | None) -> None:
        self.reference_tokens = (0, 0)  # before and behind the tokens that are drawn
        self._model, self._family = model, family
        self._sources: list[Any] | None = None  # the arguments that were read
        self._finest: tuple[int, ...] = ()

    def read(self, call: Call) -> None:
        """Look at the arguments that tell, unless they are the very same as in the last call."""
        model, family = self._model, self._family
        names = [family.grid_from] if isinstance(family.grid_from, str) else family.grid_from
        sources = [call.get(name) for name in names]
        if self._sources is None or any(a is not b for a, b in zip(sources, self._sources)):
            self._finest = family.grid(model, *sources)
            self._sources = sources
            self.reference_tokens = family.reference_tokens(model, *sources)

    def forget(self) -> None:
        """Let go of the arguments."""
        self._sources, self._finest = None, ()

    def grid(self, level: int) -> tuple[int, ...]:
        """The grid of tokens where the image is downsampled so far."""
        grid, more = self._finest, not self._family.drops_odd
        for _ in range(int(math.log2(level))):
            grid = tuple((side + more) // 2 for side in grid)
        return grid

    def around(self, sequence: Tensor, site: Site, tokens: int) -> tuple[int, int]:
        """How many tokens of a site's sequence are before and behind the picture's, which has so many."""
        before, behind = self.reference_tokens
        if sequence.shape[1] == tokens:  # the picture is alone
            return 0, 0
        text = sequence.shape[1] - tokens - before - behind
        return before + text * site.text_first, behind + text * site.text_last
