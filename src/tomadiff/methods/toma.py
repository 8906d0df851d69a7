"""ToMA: facility-location destinations, merging as attention (arXiv 2509.10918)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tomadiff import kernels
from tomadiff.core import (
    MergePlan,
    Plan,
    Regions,
    Slots,
    assign,
    facility_location,
    merging_matrix,
    num_kept,
    partition,
    regression_matrix,
    similarity,
    slot_layout,
    unit_vectors,
    unmerging_matrix,
)

from .method import MODULES, Method, PlanSettings


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
    """A plan for features [B, N, C] on a grid of tokens; given `destinations` [B, K], only new weights."""
    regions = partition(grid, settings.regions, settings.region_size, shifted, features.device)
    slots = slot_layout(regions.lengths, ratio, features.device)

    @functools.cache
    def split(regions: Regions) -> Tensor:
        """Unit vectors in region order, [B * R, n, C]. Kernels do without."""
        return regions.split(regions.arrange(unit_vectors(features)))

    if destinations is None:
        destinations = _choose(features, split, regions, slots)
    if settings.assign == "global":
        regions = partition(grid, "global", settings.region_size, False, features.device)
        slots = Slots(regions=1, kept=destinations.shape[1], size=destinations.shape[1])
    plan = Plan(
        regions, slots, destinations, *_weights(features, split, regions, slots, destinations, settings)
    )
    if not kernels.usable(features, regions.size):
        return plan
    from tomadiff.kernels.plan import Fused  # brings Triton

    return Fused(plan)


def length(grid: tuple[int, ...], ratio: float, settings: PlanSettings) -> int:
    regions = partition(grid, settings.regions, settings.region_size, False, torch.device("cpu"))
    return sum(num_kept(tokens, ratio) for tokens in regions.lengths)


Split = Callable[[Regions], Tensor]


def _choose(features: Tensor, split: Split, regions: Regions, slots: Slots) -> Tensor:
    """[B, K] destinations, by facility location in each region."""
    if kernels.usable(features, regions.size):
        from tomadiff.kernels.select import destinations  # brings Triton

        return destinations(features, regions, slots)
    unit = split(regions)
    picks = facility_location(similarity(unit), slots.size, _each(regions.real, unit))
    return slots.pack(regions.tokens_at(picks))


def _weights(
    features: Tensor,
    split: Split,
    regions: Regions,
    slots: Slots,
    destinations: Tensor,
    settings: PlanSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """The assignment, merging and unmerging matrices."""
    regression = settings.unmerge == "regression"
    if settings.unmerge != "pinv" and kernels.weighs(features, regions.size):
        from tomadiff.kernels.weights import weights  # brings Triton

        return weights(features, regions, slots, destinations, settings.scale, regression)
    unit = split(regions)
    real_tokens, real_slots = _each(regions.real, unit), _each(slots.real, unit)
    picks = regions.places_of(slots.unpack(destinations))
    assignment = assign(unit, picks, settings.scale, real_tokens, real_slots)
    merging = merging_matrix(assignment)
    if regression:
        unmerging = regression_matrix(unit, merging, real_slots)
    else:
        unmerging = unmerging_matrix(assignment, merging, settings.unmerge)
    return assignment, merging.to(features.dtype), unmerging.to(features.dtype)


def _each(mask: Tensor | None, split: Tensor) -> Tensor | None:
    """A mask over regions, [R, ...], for every sample: [B * R, ...]."""
    return None if mask is None else mask.repeat(split.shape[0] // mask.shape[0], 1)


def dependent_defaults(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Plain unmerging and longer reuse where regression can't be had, shorter reuse where it can.

    Regression solves a system as large as a region keeps tokens: too large for a region as large as the
    image. And keys and values are never unmerged. With weights made in every step, destinations that are
    kept for six steps instead of three cost 0.7 dB where fresh noise comes in.
    """
    if "global" in (settings["regions"], settings["assign"]) or settings["where"] == "kv":
        return {"unmerge": "transpose", "refresh_weights": 6}
    if settings["unmerge"] == "regression" and settings["refresh_weights"] == 1:
        return {"refresh_destinations": 3}
    return {}


METHOD = Method(
    name="toma",
    plan=plan,
    length=length,
    keeps_destinations=True,
    defaults={
        "ratio": 0.5,
        "regions": "tile",
        "region_size": 8,
        "assign": "region",
        "where": "span",
        "modules": MODULES,
        "scale": 1000.0,
        "unmerge": "regression",
        "refresh_destinations": 6,
        "refresh_weights": 1,
        "share": "block",
        "dense_blocks": 1,
    },
    dependent_defaults=dependent_defaults,
)
