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
    places = slot_layout(regions.lengths, ratio, features.device)
    unit = unit_vectors(features)
    split = regions.split(regions.arrange(unit))
    if destinations is None:
        destinations = _choose(features, split, regions, places)
    if settings.assign == "global":
        regions = partition(grid, "global", settings.region_size, False, features.device)
        places = Slots(regions=1, kept=destinations.shape[1], size=destinations.shape[1])
        split = unit
    real_tokens, real_slots = _each(regions.real, split), _each(places.real, split)
    picks = regions.places_of(places.unpack(destinations))
    assignment = assign(split, picks, settings.scale, real_tokens, real_slots)
    merging = merging_matrix(assignment)
    if settings.unmerge == "regression":
        unmerging = regression_matrix(split, merging, real_slots)
    else:
        unmerging = unmerging_matrix(assignment, merging, settings.unmerge)
    plan = Plan(
        regions, places, destinations, assignment, merging.to(features.dtype), unmerging.to(features.dtype)
    )
    if not kernels.usable(features, regions.size):
        return plan
    from tomadiff.kernels.plan import Fused  # brings Triton

    return Fused(plan)


def length(grid: tuple[int, ...], ratio: float, settings: PlanSettings) -> int:
    regions = partition(grid, settings.regions, settings.region_size, False, torch.device("cpu"))
    return sum(num_kept(tokens, ratio) for tokens in regions.lengths)


def _choose(features: Tensor, split: Tensor, regions: Regions, places: Slots) -> Tensor:
    """[B, K] destinations, by facility location in each region. split: [B * R, n, C] unit vectors."""
    if kernels.usable(features, regions.size):
        from tomadiff.kernels.select import destinations  # brings Triton

        return destinations(features, regions, places)
    picks = facility_location(similarity(split), places.size, _each(regions.real, split))
    return places.pack(regions.tokens_at(picks))


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
