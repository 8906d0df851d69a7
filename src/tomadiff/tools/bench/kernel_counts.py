"""Count ToMA's plans as the Triton kernels make and use them, without running or needing Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tomadiff.core import MergePlan, Plan, partition, slot_layout
from tomadiff.kernels import LARGEST, block
from tomadiff.methods import PlanSettings, toma
from tomadiff.methods.method import Method

from .count import Op, note_kernel, size


def by_kernels(method: Method) -> Method:
    """The method, with a plan function that notes the launches of kernels where they would be used."""
    return replace(method, plan=plan) if method.plan is toma.plan else method


def plan(
    features: Tensor,
    grid: tuple[int, ...],
    ratio: float,
    settings: PlanSettings,
    *,
    shifted: bool = False,
    depth: float = 0.0,
    destinations: Tensor | None = None,
) -> MergePlan:
    """The same as toma.plan, on the meta device."""
    regions = partition(grid, settings.regions, settings.region_size, shifted, features.device)
    slots = slot_layout(regions.lengths, ratio, features.device)
    groups, n, k, channels = len(features) * regions.count, regions.size, slots.size, features.shape[-1]
    if destinations is None and n <= LARGEST:
        destinations = features.new_empty(len(features), slots.kept, dtype=torch.long)
        moved = size(features, destinations)
        flops = 2 * groups * n * n * channels
        note_kernel(Op("destinations", "plan", flops, moved, torch.float32, (groups, n, n), k))
    regression = toma.regression_by_kernel(settings, n, k)
    if regression is None:
        made: MergePlan = toma.plan(
            features, grid, ratio, settings, shifted=shifted, depth=depth, destinations=destinations
        )
        return CountedPlan(made) if isinstance(made, Plan) and made.regions.size <= LARGEST else made
    assert destinations is not None
    assignment = features.new_empty(groups, k, n, dtype=torch.float32)
    merging, unmerging = features.new_empty(groups, k, n), features.new_empty(groups, n, k)
    places, scratch = block(n), None
    products, rounds = k * n * channels, 0
    if regression:
        products += n * n * channels + k * n * n + k * k * n + k * k * (k + n)
        scratch = features.new_empty(groups, places + 2 * block(k), places, dtype=torch.float32)
        rounds = k  # of elimination
    # norms are summed before products; what regression keeps in memory is written and read
    moved = size(features, features, destinations, assignment, merging, unmerging, scratch, scratch)
    note_kernel(Op("weights", "plan", 2 * groups * products, moved, torch.float32, (groups, n, n), rounds))
    return CountedPlan(Plan(regions, slots, destinations, assignment, merging, unmerging))


@dataclass(frozen=True)
class CountedPlan:
    """A plan on the meta device that notes one launch for merging and one for unmerging."""

    plan: Plan

    @property
    def destinations(self) -> Tensor:
        return self.plan.destinations

    def merge(self, x: Tensor) -> Tensor:
        merged = x.new_empty(len(x), self.plan.slots.kept, x.shape[-1])
        return self._mixed(self.plan.merging, merged, x)

    def unmerge(self, y: Tensor, onto: Tensor | None = None, merged: Tensor | None = None) -> Tensor:
        whole = y.new_empty(len(y), self.plan.regions.tokens, y.shape[-1])
        return self._mixed(self.plan.unmerging, whole, y, onto, merged)

    def cast(self, dtype: torch.dtype) -> CountedPlan:
        return CountedPlan(self.plan.cast(dtype))

    def owners(self) -> Tensor:
        return self.plan.owners()

    def log_sizes(self) -> Tensor:
        return self.plan.log_sizes()

    @staticmethod
    def _mixed(weights: Tensor, out: Tensor, *read: Tensor | None) -> Tensor:
        channels = out.shape[-1]
        product = (*weights.shape[:2], channels)
        flops, moved = 2 * weights.numel() * channels, size(weights, out, *read)
        note_kernel(Op("mix", "merge", flops, moved, out.dtype, product))
        return out
