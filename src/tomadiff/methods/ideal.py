"""No merging: sites run on the first tokens. The most that token reduction could save, to measure by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tomadiff.config import Config
from tomadiff.core import Regions, num_kept, partition


@dataclass(frozen=True)
class FirstTokens:
    regions: Regions
    destinations: Tensor

    def merge(self, x: Tensor) -> Tensor:
        return x[:, : self.destinations.shape[1]]

    def unmerge(self, y: Tensor, onto: Tensor | None = None, merged: Tensor | None = None) -> Tensor:
        # what the site computed is dropped: putting it anywhere would cost time
        return y[:, :1].expand(-1, self.regions.tokens, -1) if onto is None else onto

    def owners(self) -> Tensor:
        everyone = torch.arange(self.regions.tokens, device=self.destinations.device)
        return everyone.clamp_max(self.destinations.shape[1] - 1).expand(len(self.destinations), -1)

    def log_sizes(self) -> Tensor:
        return torch.zeros(self.destinations.shape, dtype=torch.float32, device=self.destinations.device)


def plan(
    features: Tensor,
    grid: tuple[int, ...],
    ratio: float,
    config: Config,
    *,
    shifted: bool = False,
    depth: float = 0.0,
    destinations: Tensor | None = None,
) -> FirstTokens:
    first = torch.arange(length(grid, ratio, config), device=features.device).expand(features.shape[0], -1)
    return FirstTokens(partition(grid, "global", 1, False, features.device), first)  # nothing moves


def length(grid: tuple[int, ...], ratio: float, config: Config) -> int:
    """As many as ToMA's plans for the same regions."""
    regions = partition(grid, config.regions, config.region_size, False, torch.device("cpu"))
    return sum(num_kept(tokens, ratio) for tokens in regions.lengths)
