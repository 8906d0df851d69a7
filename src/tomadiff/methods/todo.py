"""ToDo: keys and values from a downsampled grid (Smith et al. 2024, arXiv 2402.13573)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tomadiff.errors import ConfigError

from .method import Method, PlanSettings, Requirement
from .tome import DEFAULTS


@dataclass(frozen=True)
class Downsampling:
    """Nearest-neighbour downsampling: one token of each cell stands for all tokens of the cell."""

    destinations: Tensor  # [B, K]
    cells: Tensor  # [N] the cell of each token
    sizes: Tensor  # [K] how many tokens each cell has

    def merge(self, x: Tensor) -> Tensor:
        return x.index_select(1, self.destinations[0])

    def unmerge(self, y: Tensor, onto: Tensor | None = None, merged: Tensor | None = None) -> Tensor:
        """Upsampling: each token gets a copy of its cell's token."""
        return y[:, self.cells] if onto is None else onto + (y - merged)[:, self.cells]

    def owners(self) -> Tensor:
        return self.destinations[:, self.cells]

    def log_sizes(self) -> Tensor:
        return self.sizes.log().expand(self.destinations.shape)


def plan(
    features: Tensor,
    grid: tuple[int, ...],
    ratio: float,
    settings: PlanSettings,
    *,
    shifted: bool = False,
    depth: float = 0.0,
    destinations: Tensor | None = None,
) -> Downsampling:
    """A ratio of 1 - 1 / f^2 downsamples by a factor of f, whatever the features are."""
    chosen, cells, sizes = _downsampled(grid, _factor(ratio), shifted, features.device)
    if settings.shift:
        _downsampled(grid, _factor(ratio), not shifted, features.device)
    return Downsampling(chosen.expand(features.shape[0], -1), cells, sizes)


def length(grid: tuple[int, ...], ratio: float, settings: PlanSettings) -> int:
    return math.prod(grid[:-2]) * math.prod(math.ceil(side / _factor(ratio)) for side in grid[-2:])


def _factor(ratio: float) -> int:
    return round((1 - ratio) ** -0.5)


@lru_cache(maxsize=64)
def _downsampled(
    grid: tuple[int, ...], factor: int, shifted: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The token that stands for each cell, [K], the cell of each token, [N], and sizes of cells, [K] fp32."""
    factors = (1,) * (len(grid) - 2) + (factor, factor)  # in video, frames are downsampled one by one
    # cached tensors outlive the call that made them, and inference tensors can't be used under autograd later
    with torch.inference_mode(False):
        index = torch.arange(math.prod(grid)).reshape(grid)
        cells = torch.zeros(grid, dtype=torch.long)
        sizes = torch.ones((1,) * len(grid), dtype=torch.float32)
        for axis, (side, factor) in enumerate(zip(grid, factors)):
            across = torch.arange(side) // factor
            shape = [-1 if a == axis else 1 for a in range(len(grid))]
            cells = cells * math.ceil(side / factor) + across.reshape(shape)
            corner = factor - 1 if shifted else 0
            starts = torch.arange(0, side, factor)
            index = index.index_select(axis, (starts + corner).clamp_max(side - 1))
            sizes = sizes * (side - starts).clamp_max(factor).reshape(shape)
        # sizes are not counted, since counting on a device makes the host wait for it
        return index.flatten().to(device), cells.flatten().to(device), sizes.flatten().to(device)


def check_ratio(ratio: float) -> None:
    if not any(abs(ratio - (1 - 1 / f**2)) < 0.005 for f in range(2, 9)):
        raise ConfigError(
            f'ratio={ratio!r} can\'t be had from method="todo", which downsamples by whole factors: '
            "0.75 (2 x 2), 0.889 (3 x 3), 0.9375 (4 x 4), ..."
        )


METHOD = Method(
    name="todo",
    plan=plan,
    length=length,
    defaults=DEFAULTS | {"ratio": 0.75, "where": "kv", "share": "kind"},
    requires=(Requirement("where", "kv", "leaves queries whole"),),
    check_ratio=check_ratio,
)
