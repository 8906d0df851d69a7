"""Partition the token grid into regions, and reorder tokens between image order and region order.

Everything ToMA does happens inside a region, with all regions side by side in the batch dimension, so a
layout of regions is a permutation of the tokens. A grid that regions don't divide evenly is cut into nearly
equal regions, and the smaller ones are padded: the `real` masks below are False for padding.

A token's place is its index in region order; a slot is an index in the merged tokens of all regions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)  # `partition` makes each once: comparing and hashing by identity is quick
class Regions:
    """`count` regions of up to `size` tokens; in shapes, R = count, n = size, N = tokens."""

    tokens: int
    count: int
    size: int
    lengths: tuple[int, ...]  # number of real tokens in each region
    order: Tensor | None  # [R * n] the token at each place; None if region order is image order
    places: Tensor | None  # [N] the place of each token; None if region order is image order
    real: Tensor | None  # [R, n] bool, False where a place is padding; None if there is no padding

    def arrange(self, x: Tensor) -> Tensor:
        """Into region order: [B, N, C] -> [B, R * n, C]. Padding repeats tokens; masks give it no weight."""
        return x if self.order is None else x.index_select(1, self.order)

    def restore(self, x: Tensor) -> Tensor:
        """Back into image order, the inverse of `arrange`: [B, R * n, C] -> [B, N, C]."""
        return x if self.places is None else x.index_select(1, self.places)

    def split(self, x: Tensor) -> Tensor:
        """Move the regions of arranged tokens into the batch: [B, R * n, C] -> [B * R, n, C]."""
        return x.reshape(-1, self.size, x.shape[-1])

    def tokens_at(self, picks: Tensor) -> Tensor:
        """The token numbers at these places within each region: [B * R, k] -> [B * R, k]."""
        first = torch.arange(0, self.count * self.size, self.size, device=picks.device)
        picks = picks + first.repeat(picks.shape[0] // self.count)[:, None]
        return picks if self.order is None else self.order[picks]

    def places_of(self, tokens: Tensor) -> Tensor:
        """The places of tokens within their regions; `tokens` may have any shape."""
        return (tokens if self.places is None else self.places[tokens]) % self.size


@dataclass(frozen=True, eq=False)  # `slot_layout` and `one_region` make each once
class Slots:
    """Where each region's merged tokens sit in the merged sequence: K tokens, at most k per region."""

    regions: int  # R
    kept: int  # K, summed over all regions
    size: int  # k, the number of slots per region: as many as the largest region needs
    real: Tensor | None = None  # [R, k] bool, False for the surplus slots of smaller regions
    index: Tensor | None = None  # [K] the slot of each merged token
    positions: Tensor | None = None  # [R * k] the merged token in each slot; surplus slots repeat one

    def pack(self, x: Tensor) -> Tensor:
        """From slots to the merged sequence: [B * R, k, ...] -> [B, K, ...]."""
        x = x.reshape(-1, self.regions * self.size, *x.shape[2:])
        return x if self.index is None else x.index_select(1, self.index)

    def unpack(self, x: Tensor) -> Tensor:
        """From the merged sequence to slots: [B, K, ...] -> [B * R, k, ...]."""
        if self.positions is not None:
            x = x.index_select(1, self.positions)
        return x.reshape(-1, self.size, *x.shape[2:])


def num_kept(tokens: int, ratio: float) -> int:
    """K = N - floor(N * ratio), at least 1. The 1e-9 is for products like 100 * 0.29, which is 28.999..."""
    return max(1, tokens - math.floor(tokens * ratio + 1e-9))


@lru_cache(maxsize=64)
def partition(
    grid: tuple[int, ...], kind: str, size: int | tuple[int, ...], shift: bool, device: torch.device
) -> Regions:
    """The regions of a grid with any number of axes; tokens are in row-major order.

    kind "tile": boxes with sides of at most `size` tokens, one number per axis; a single number means square
    tiles along the last two axes, each within one frame of a video.
    kind "stripe": contiguous runs of the sequence with as many tokens as a tile.
    kind "global": one region.
    `shift` moves all regions by half their size, wrapping around the edges, so that none gets smaller.
    """
    tokens = math.prod(grid)
    sides = (1,) * (len(grid) - 2) + (size, size) if isinstance(size, int) else size
    if kind == "global":
        grid, sides = (tokens,), (tokens,)
    elif kind == "stripe":
        grid, sides = (tokens,), (math.prod(sides),)
    # Cached tensors outlive the call that made them, and inference tensors can't be used under autograd then.
    # On the CPU, since on another default device each look at a value would wait for it.
    with torch.inference_mode(False), torch.device("cpu"):
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
    # padding repeats the region's first token
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
    """The slots for the merged tokens of regions with these numbers of real tokens."""
    counts = [num_kept(length, ratio) for length in lengths]
    size = max(counts)
    if min(counts) == size:
        return Slots(len(counts), sum(counts), size)
    with torch.inference_mode(False), torch.device("cpu"):
        real = torch.arange(size) < torch.tensor(counts)[:, None]
        positions = (real.flatten().cumsum(0) - 1).clamp_min_(0)
        index = real.flatten().nonzero().flatten()
        return Slots(len(counts), sum(counts), size, real.to(device), index.to(device), positions.to(device))


@lru_cache(maxsize=64)
def one_region(kept: int) -> Slots:
    """The slots of a single region that keeps so many tokens."""
    return Slots(regions=1, kept=kept, size=kept)
