"""Sequences of pictures whose tokens come with positions: number of the picture, row, column.

The picture that is drawn has the lowest number. References beside it stay whole on purpose: they are what a
picture has to agree with, and they are not a picture's own to blur.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def _drawn(ids: Tensor) -> tuple[int, int, int, int]:
    """Where the drawn picture starts in the sequence, its tokens, rows and columns. Waits for the device."""
    ids = ids[0] if ids.ndim == 3 else ids
    numbers, counts = (part.tolist() for part in ids[:, 0].unique_consecutive(return_counts=True))
    place = numbers.index(min(numbers))
    start, tokens = sum(counts[:place]), counts[place]
    sides = (ids[start + tokens - 1] - ids[start]).tolist()
    return start, tokens, int(sides[1]) + 1, int(sides[2]) + 1


def grid(model: nn.Module, ids: Tensor) -> tuple[int, ...]:
    _, tokens, *sides = _drawn(ids)
    return tuple(sides) if math.prod(sides) == tokens else (tokens,)


def reference_tokens(model: nn.Module, ids: Tensor) -> tuple[int, int]:
    start, tokens, *_ = _drawn(ids)
    return start, ids.shape[-2] - start - tokens
