"""ToFu: prune where a model is far from linear, merge where it is not (Kim et al. 2024, arXiv 2312.01026)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .method import Method, PlanSettings, Requirement
from .tome import DEFAULTS, Matching, check_ratio, length, match, pick

PRUNED = 0.5  # the first half of the blocks prune


class Pruning(Matching):
    """Tokens that join a destination are dropped, and destinations stay as they are."""

    def merge(self, x: Tensor) -> Tensor:
        return pick(x, self.destinations)

    def sizes(self) -> Tensor:
        return torch.ones(self.destinations.shape, dtype=torch.float32, device=self.joined.device)


class Mlerp(Matching):
    """The mean, scaled to the largest norm among the merged tokens: averaging alone shortens vectors."""

    def merge(self, x: Tensor) -> Tensor:
        mean = super().merge(x)
        norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        largest = norms.new_zeros(self.destinations.shape).scatter_reduce_(1, self.joined, norms, "amax")
        length = torch.linalg.vector_norm(mean, dim=-1, dtype=torch.float32).clamp_min(1e-12)
        return mean * (largest / length)[..., None].to(x.dtype)


def plan(
    features: Tensor,
    grid: tuple[int, ...],
    ratio: float,
    settings: PlanSettings,
    *,
    shifted: bool = False,
    depth: float = 0.0,
    destinations: Tensor | None = None,
) -> Matching:
    """ToMe's matching; early blocks prune, later ones merge."""
    reduction = Pruning if depth < PRUNED else Mlerp
    return reduction(*match(features, grid, ratio, settings, shifted))


METHOD = Method(
    name="tofu",
    plan=plan,
    length=length,
    defaults=DEFAULTS,
    requires=(Requirement("share", "block", "treats early and late blocks differently"),),
    check_ratio=partial(check_ratio, "tofu"),
    from_block_input=True,
)
