"""No merging: sites run on the first K tokens. An upper limit of what token reduction can save."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import toma
from .method import Method, PlanSettings


@dataclass(frozen=True)
class FirstTokens:
    tokens: int
    destinations: Tensor  # [B, K]

    def merge(self, x: Tensor) -> Tensor:
        return x[:, : self.destinations.shape[1]]

    def unmerge(self, y: Tensor, onto: Tensor | None = None, merged: Tensor | None = None) -> Tensor:
        # what the site computed is dropped: putting it anywhere would cost time
        return y[:, :1].expand(-1, self.tokens, -1) if onto is None else onto

    def owners(self) -> Tensor:
        everyone = torch.arange(self.tokens, device=self.destinations.device)
        return everyone.clamp_max(self.destinations.shape[1] - 1).expand(len(self.destinations), -1)

    def log_sizes(self) -> Tensor:
        return torch.zeros(self.destinations.shape, dtype=torch.float32, device=self.destinations.device)


def plan(
    features: Tensor,
    grid: tuple[int, ...],
    ratio: float,
    settings: PlanSettings,
    *,
    shifted: bool = False,
    depth: float = 0.0,
    destinations: Tensor | None = None,
) -> FirstTokens:
    first = torch.arange(toma.length(grid, ratio, settings), device=features.device)
    return FirstTokens(features.shape[1], first.expand(len(features), -1))


METHOD = Method(
    name="ideal",
    plan=plan,
    length=toma.length,
    defaults=toma.METHOD.defaults,
    dependent_defaults=toma.dependent_defaults,
    keeps_destinations=True,
)
