"""Features become a plan."""

from __future__ import annotations

from torch import Tensor

from .plan import (
    Plan,
    assign,
    merging_matrix,
    regression_matrix,
    similarity,
    unit_vectors,
    unmerging_matrix,
)
from .precision import exact_products
from .regions import Regions, Slots, one_region, partition
from .select import facility_location


@exact_products()
def make_plan(
    features: Tensor,
    regions: Regions,
    slots: Slots,
    scale: float,
    unmerge: str,
    *,
    assign_globally: bool = False,
    destinations: Tensor | None = None,
) -> Plan:
    """A plan for features [B, N, C] in image order; given `destinations` [B, K], only new weights.

    Destinations are chosen in `regions`. Tokens are assigned in them, too, or to all of the image's
    destinations. `unmerge` is "transpose", "pinv" or "regression".
    """
    unit = unit_vectors(features)
    split = regions.split(regions.arrange(unit))
    if destinations is None:
        picks = facility_location(similarity(split), slots.size, _each(regions.real, split))
        destinations = slots.pack(regions.tokens_at(picks))
    if assign_globally:
        regions = partition((regions.tokens,), "global", regions.tokens, False, features.device)
        slots = one_region(destinations.shape[1])
        split = unit
    real_tokens, real_slots = _each(regions.real, split), _each(slots.real, split)
    picks = regions.places_of(slots.unpack(destinations))
    assignment = assign(split, picks, scale, real_tokens, real_slots)
    merging = merging_matrix(assignment)
    if unmerge == "regression":
        unmerging = regression_matrix(split, merging, real_slots)
    else:
        unmerging = unmerging_matrix(assignment, merging, unmerge)
    return Plan(
        regions, slots, destinations, assignment, merging.to(features.dtype), unmerging.to(features.dtype)
    )


def _each(mask: Tensor | None, split: Tensor) -> Tensor | None:
    """A mask over regions, [R, ...], for every sample: [B * R, ...]."""
    return None if mask is None else mask.repeat(split.shape[0] // mask.shape[0], 1)
