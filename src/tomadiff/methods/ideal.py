"""No merging: sites run on the first tokens. The most that token reduction could save, to measure by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import Config
from ..core import Regions, Slots, cut, slots


@dataclass(frozen=True)
class FirstTokens:
    regions: Regions
    slots: Slots
    destinations: Tensor

    def merge(self, x: Tensor) -> Tensor:
        return x[:, : self.slots.kept]

    def unmerge(self, y: Tensor, onto: Tensor | None = None) -> Tensor:
        # what the site computed is dropped: putting it anywhere would cost time
        return y[:, :1].expand(-1, self.regions.tokens, -1) if onto is None else onto

    def rows(self, table: Tensor) -> Tensor:
        lead = table.shape[0] - self.regions.tokens
        return table[None, : lead + self.slots.kept].expand(len(self.destinations), -1, -1)

    def log_sizes(self) -> Tensor:
        return torch.zeros(self.destinations.shape, device=self.destinations.device)


def plan(
    features: Tensor,
    grid: tuple[int, ...],
    ratio: float,
    config: Config,
    shifted: bool = False,
    destinations: Tensor | None = None,
) -> FirstTokens:
    regions = cut(grid, config.regions, config.region_size, shifted, features.device)
    places = slots(regions.lengths, ratio, features.device)
    first = torch.arange(places.kept, device=features.device).expand(features.shape[0], -1)
    return FirstTokens(cut(grid, "global", 1, False, features.device), places, first)  # nothing moves
