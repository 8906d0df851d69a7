"""ToMA: facility-location destinations, merging as attention (arXiv 2509.10918)."""

from __future__ import annotations

import torch
from torch import Tensor

from tomadiff import kernels
from tomadiff.config import Config
from tomadiff.core import (
    MergePlan,
    Plan,
    Regions,
    Slots,
    assign,
    facility_location,
    merging_matrix,
    partition,
    regression_matrix,
    similarity,
    slot_layout,
    unmerging_matrix,
)


def plan(
    features: Tensor,
    grid: tuple[int, ...],
    ratio: float,
    config: Config,
    *,
    shifted: bool = False,
    depth: float = 0.0,
    destinations: Tensor | None = None,
) -> MergePlan:
    """A plan for features [B, N, C] on a grid of tokens; given `destinations` [B, K], only new weights."""
    regions = partition(grid, config.regions, config.region_size, shifted, features.device)
    places = slot_layout(regions.lengths, ratio, features.device)
    if destinations is None:
        destinations = _choose(features, regions, places)
    if config.assign == "global":
        regions = partition(grid, "global", config.region_size, False, features.device)
        places = Slots(regions=1, kept=destinations.shape[1], size=destinations.shape[1])
    split = regions.split(regions.arrange(features))
    real_tokens, real_slots = _each(regions.real, split), _each(places.real, split)
    picks = regions.places_of(places.unpack(destinations))
    assignment = assign(split, picks, config.scale, real_tokens, real_slots)
    merging = merging_matrix(assignment)
    if config.unmerge == "regression":
        unmerging = regression_matrix(split, merging, real_slots)
    else:
        unmerging = unmerging_matrix(assignment, merging, config.unmerge)
    plan = Plan(
        regions, places, destinations, assignment, merging.to(features.dtype), unmerging.to(features.dtype)
    )
    if not kernels.usable(features, regions.size):
        return plan
    from tomadiff.kernels.plan import Fused  # brings Triton

    return Fused(plan, partition(grid, "global", config.region_size, False, features.device))


def lengths(grid: tuple[int, ...], ratio: float, config: Config, device: torch.device) -> tuple[int, int]:
    """How many tokens plans keep, and in how many places tokens are when arranged for them."""
    regions = partition(grid, config.regions, config.region_size, False, device)
    in_order = config.assign == "global" or kernels.usable(torch.empty(0, device=device), regions.size)
    places = regions.tokens if in_order else regions.count * regions.size
    return slot_layout(regions.lengths, ratio, device).kept, places


def _choose(features: Tensor, regions: Regions, places: Slots) -> Tensor:
    """[B, K] destinations, by facility location in each region."""
    if kernels.usable(features, regions.size):
        from tomadiff.kernels.select import destinations  # brings Triton

        return destinations(features, regions, places)
    split = regions.split(regions.arrange(features))
    picks = facility_location(similarity(split), places.size, _each(regions.real, split))
    return places.pack(regions.tokens_at(picks))


def _each(mask: Tensor | None, split: Tensor) -> Tensor | None:
    """A mask over regions, [R, ...], for every sample: [B * R, ...]."""
    return None if mask is None else mask.repeat(split.shape[0] // mask.shape[0], 1)
