"""The grid of tokens cut into regions, and the tokens moved between the two orders.

Everything ToMA does happens inside a region, with all regions side by side in the batch dimension, so a
layout of regions is a permutation of the tokens. Grids that regions don't divide are cut into nearly equal
ones, and the smaller ones are padded: the masks below say which places and which slots are real.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Regions:
    """`count` regions of up to `size` tokens; the shorthand for shapes is R = count, n = size, N = tokens."""

    tokens: int
    count: int
    size: int
    lengths: tuple[int, ...]  # real tokens in each region
    order: Tensor | None  # [R * n] the token at each place; None where nothing has to move
    places: Tensor | None  # [N] the place of each token
    real: Tensor | None  # [R, n] bool, False where a place is padding; None where none is

    def arrange(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, R * n, C], region by region; padding repeats tokens, and weighs nothing later."""
        return x if self.order is None else x.index_select(1, self.order)

    def restore(self, x: Tensor) -> Tensor:
        """[B, R * n, C] -> [B, N, C], the inverse of `arrange`."""
        return x if self.places is None else x.index_select(1, self.places)

    def split(self, x: Tensor) -> Tensor:
        """Arranged tokens with the regions in the batch: [B, R * n, C] -> [B * R, n, C]."""
        return x.reshape(x.shape[0] * self.count, self.size, x.shape[-1])

    def tokens_at(self, picks: Tensor) -> Tensor:
        """Places within regions, [B * R, k], as token numbers, [B * R, k]."""
        first = torch.arange(0, self.count * self.size, self.size, device=picks.device)
        picks = picks + first.repeat(picks.shape[0] // self.count)[:, None]
        return picks if self.order is None else self.order[picks]

    def places_of(self, tokens: Tensor) -> Tensor:
        """Token numbers, any shape, as places within their regions."""
        return (tokens if self.places is None else self.places[tokens]) % self.size


@dataclass(frozen=True)
class Slots:
    """Where the merged tokens of each region sit in the shortened sequence: K tokens, at most k a region."""

    regions: int  # R
    kept: int  # K, over all regions
    size: int  # k, of the largest region
    real: Tensor | None = None  # [R, k] bool, False for the surplus slots of smaller regions
    index: Tensor | None = None  # [K] the slot of each merged token
    positions: Tensor | None = None  # [R * k] the merged token in each slot; surplus slots repeat one

    def pack(self, x: Tensor) -> Tensor:
        """[B * R, k, ...] -> [B, K, ...]."""
        x = x.reshape(x.shape[0] // self.regions, self.regions * self.size, *x.shape[2:])
        return x if self.index is None else x.index_select(1, self.index)

    def unpack(self, x: Tensor) -> Tensor:
        """[B, K, ...] -> [B * R, k, ...]."""
        if self.positions is not None:
            x = x.index_select(1, self.positions)
        return x.reshape(x.shape[0] * self.regions, self.size, *x.shape[2:])


def num_kept(tokens: int, ratio: float) -> int:
    """K = N - floor(N * ratio), at least one; the small term keeps 100 * 0.29 from being 28.999..."""
    return max(1, tokens - math.floor(tokens * ratio + 1e-9))


@lru_cache(maxsize=64)
def partition(
    grid: tuple[int, ...], kind: str, size: int | tuple[int, ...], shift: bool, device: torch.device
) -> Regions:
    """The regions of a grid of any number of axes, tokens in row-major order.

    kind "tile": boxes of at most `size` tokens a side, one number for each axis; a single number means tiles
    along the last two axes, each within one frame of a video.
    kind "stripe": runs of the sequence, as long as a tile has tokens. kind "global": everything.
    `shift` moves the layout by half a region, round the edges, so that no region gets smaller.
    """
    tokens = math.prod(grid)
    sides = (1,) * (len(grid) - 2) + (size, size) if isinstance(size, int) else size
    if kind == "global":
        grid, sides = (tokens,), (tokens,)
    elif kind == "stripe":
        grid, sides = (tokens,), (math.prod(sides),)
    # cached tensors outlive the call that made them, and inference tensors can't be used under autograd later
    with torch.inference_mode(False):
        index = torch.arange(tokens).reshape(grid)
        if shift:
            steps = [-(min(side, axis) // 2) for side, axis in zip(sides, grid)]
            index = index.roll(steps, list(range(len(grid))))
        boxes = [index]
        for axis, side in enumerate(sides):
            parts = math.ceil(grid[axis] / side)
            boxes = [part for box in boxes for part in box.tensor_split(parts, dim=axis)]
        return _layout(tokens, [box.flatten() for box in boxes], device)


def _layout(tokens: int, boxes: Sequence[Tensor], device: torch.device) -> Regions:
    lengths = tuple(len(box) for box in boxes)
    size = max(lengths)
    real = torch.arange(size) < torch.tensor(lengths)[:, None]
    # a padded place names a token of its own region
    order = torch.stack([torch.cat([box, box[:1].expand(size - len(box))]) for box in boxes])
    places = torch.empty(tokens, dtype=torch.long)
    places[order[real]] = torch.arange(order.numel()).reshape(order.shape)[real]
    in_order = order.numel() == tokens and bool((order.flatten() == torch.arange(tokens)).all())
    return Regions(
        tokens=tokens,
        count=len(boxes),
        size=size,
        lengths=lengths,
        order=None if in_order else order.flatten().to(device),
        places=None if in_order else places.to(device),
        real=None if bool(real.all()) else real.to(device),
    )


@lru_cache(maxsize=64)
def slot_layout(lengths: tuple[int, ...], ratio: float, device: torch.device) -> Slots:
    """The slots of the merged tokens of regions with these lengths."""
    counts = [num_kept(length, ratio) for length in lengths]
    size = max(counts)
    if min(counts) == size:
        return Slots(len(counts), sum(counts), size)
    with torch.inference_mode(False):
        real = torch.arange(size) < torch.tensor(counts)[:, None]
        positions = (real.flatten().cumsum(0) - 1).clamp_min_(0)
        index = real.flatten().nonzero().flatten()
        return Slots(len(counts), sum(counts), size, real.to(device), index.to(device), positions.to(device))
