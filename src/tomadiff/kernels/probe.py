"""Check that the kernels agree with core on a device, by running each of them once on a small example."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tomadiff.core import (
    Plan,
    Regions,
    assign,
    exact_products,
    facility_location,
    merging_matrix,
    partition,
    regression_matrix,
    similarity,
    slot_layout,
    unit_vectors,
)

from . import LARGEST_WEIGHED
from .merge import merge, unmerge
from .select import destinations
from .weights import weights

SCALE = 1000.0


def difference(
    device: torch.device,
    dtype: torch.dtype,
    grid: tuple[int, ...] = (8, 13),
    kind: str = "tile",
    size: int | tuple[int, ...] = 8,
    channels: int = 80,
) -> str | None:
    """What the kernels do wrong in this dtype, in words; None if nothing.

    The default example has ragged tiles, and channels that don't fill the last block.
    """
    generator = torch.Generator().manual_seed(0)
    # "cpu", as the generator is: the user may have set another default device
    x = torch.randn(2, math.prod(grid), channels, generator=generator, device="cpu")
    x = (x + 0.5).to(device, dtype)
    with torch.no_grad(), torch.autocast(device.type, enabled=False), exact_products():
        plan = core_plan(x, partition(grid, kind, size, False, device))
        chosen = destinations(x, plan.regions, plan.slots)
        if not bool(((chosen >= 0) & (chosen < x.shape[1])).all()):
            return "choose tokens that there are not"
        # compare coverage, not tokens: rounding may decide between two tokens that are equally good
        if not torch.allclose(_coverage(x, plan, chosen), _coverage(x, plan, plan.destinations), rtol=1e-4):
            return "choose worse destinations than core"
        if plan.regions.size <= LARGEST_WEIGHED:
            matrices = weights(x, plan.regions, plan.slots, plan.destinations, SCALE, regression=True)
            expected = plan.assignment, plan.merging, plan.unmerging
            # rounding differs by far less, and errors of TF32, for example, are far larger
            if not all(_close(a, b, 1e-2) for a, b in zip(_real(matrices, plan), _real(expected, plan))):
                return "weigh tokens otherwise than core"
        merged = plan.merge(x)
        whole = plan.unmerge(2 * merged, x, merged)
        repeats: dict = {}
        for _ in range(2):  # the second time repeats the first launch, by another code path
            if not _close(merge(plan, x, repeats), merged):
                return "merge otherwise than core"
            if not _close(unmerge(plan, 2 * merged, x, merged, repeats), whole):
                return "unmerge otherwise than core"
            if not _close(unmerge(plan, merged, repeats=repeats), plan.unmerge(merged)):
                return "unmerge values otherwise than core"
    return None


def example(places: int) -> tuple[tuple[int, int], str, tuple[int, int]]:
    """A grid, kind and size of regions that need a block of so many places, without filling it evenly."""
    rows = 1 << (places.bit_length() - 1) // 2
    columns = places // rows
    return (rows, 2 * columns - 3), "tile", (rows, columns)


def core_plan(x: Tensor, regions: Regions) -> Plan:
    """A plan made by core alone, at ratio 0.5."""
    slots = slot_layout(regions.lengths, 0.5, x.device)
    split = regions.split(regions.arrange(unit_vectors(x)))
    real = None if regions.real is None else regions.real.repeat(len(x), 1)
    real_slots = None if slots.real is None else slots.real.repeat(len(x), 1)
    chosen = slots.pack(regions.tokens_at(facility_location(similarity(split), slots.size, real)))
    picks = regions.places_of(slots.unpack(chosen))
    assignment = assign(split, picks, SCALE, real, real_slots)
    merging = merging_matrix(assignment)
    unmerging = regression_matrix(split, merging, real_slots)
    return Plan(regions, slots, chosen, assignment, merging.to(x.dtype), unmerging.to(x.dtype))


def _coverage(x: Tensor, plan: Plan, chosen: Tensor) -> Tensor:
    """The objective that destinations maximise: similarity to the nearest one, summed over each region."""
    cosines = similarity(plan.regions.split(plan.regions.arrange(unit_vectors(x))))
    picks = plan.regions.places_of(plan.slots.unpack(chosen))
    nearest = cosines.gather(1, picks[..., None].expand(-1, -1, cosines.shape[-1])).amax(1)
    real = plan.regions.real
    return (nearest if real is None else nearest * real.repeat(len(x), 1)).sum(-1)


def _real(matrices: tuple[Tensor, Tensor, Tensor], plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Without the rows of unmerging that are padding, which nobody reads."""
    assignment, merging, unmerging = matrices
    real = plan.regions.real
    if real is None:
        return matrices
    return assignment, merging, unmerging * real.repeat(len(plan.destinations), 1)[..., None]


def _close(found: Tensor, expected: Tensor, error: float | None = None) -> bool:
    """Whether two results are equal, by default up to the dtype's rounding and the order of summation."""
    error = 8 * torch.finfo(found.dtype).eps if error is None else error
    return torch.allclose(found.float(), expected.float(), rtol=error, atol=error)
