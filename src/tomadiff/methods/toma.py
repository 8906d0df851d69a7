"""ToMA: facility-location destinations, merging as attention (arXiv 2509.10918)."""

from __future__ import annotations

from collections.abc import Mapping
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
    exact_products,
    facility_location,
    merging_matrix,
    num_kept,
    one_region,
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
    if not kernels.usable(features, regions.size):
        return core_plan(features, regions, slots, settings, destinations)
    from tomadiff.kernels import plan as by_kernels  # brings Triton

    if destinations is None:
        destinations = by_kernels.destinations(features, regions, slots)
    if settings.assign == "global" or settings.unmerge == "pinv" or regions.size > kernels.LARGEST_WEIGHED:
        plan = core_plan(features, regions, slots, settings, destinations)
        return by_kernels.Fused(plan) if kernels.usable(features, plan.regions.size) else plan
    regression = settings.unmerge == "regression"
    matrices = by_kernels.weights(features, regions, slots, destinations, settings.scale, regression)
    return by_kernels.Fused(Plan(regions, slots, destinations, *matrices))


@exact_products()
def core_plan(
    features: Tensor,
    regions: Regions,
    slots: Slots,
    settings: PlanSettings,
    destinations: Tensor | None = None,
) -> Plan:
    """The same by core alone; destinations are chosen in `regions`."""
    unit = unit_vectors(features)
    split = regions.split(regions.arrange(unit))
    if destinations is None:
        picks = facility_location(similarity(split), slots.size, _each(regions.real, split))
        destinations = slots.pack(regions.tokens_at(picks))
    if settings.assign == "global":
        regions = partition((regions.tokens,), "global", settings.region_size, False, features.device)
        slots = one_region(destinations.shape[1])
        split = unit
    real_tokens, real_slots = _each(regions.real, split), _each(slots.real, split)
    picks = regions.places_of(slots.unpack(destinations))
    assignment = assign(split, picks, settings.scale, real_tokens, real_slots)
    merging = merging_matrix(assignment)
    if settings.unmerge == "regression":
        unmerging = regression_matrix(split, merging, real_slots)
    else:
        unmerging = unmerging_matrix(assignment, merging, settings.unmerge)
    return Plan(
        regions, slots, destinations, assignment, merging.to(features.dtype), unmerging.to(features.dtype)
    )


def length(grid: tuple[int, ...], ratio: float, settings: PlanSettings) -> int:
    regions = partition(grid, settings.regions, settings.region_size, False, torch.device("cpu"))
    return sum(num_kept(tokens, ratio) for tokens in regions.lengths)


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
