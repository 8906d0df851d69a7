"""Sequences of several images whose tokens have position ids: index of the image, row, column.

The image being generated has the lowest index. Reference images in the same sequence are never merged: the
generated image has to agree with them in detail.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def _drawn(ids: Tensor) -> tuple[int, int, int, int]:
    """Start, number of tokens, rows and columns of the image being generated. Synchronises the device."""
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
