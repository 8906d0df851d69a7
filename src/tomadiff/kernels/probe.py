"""Check that the kernels agree with core on a device, by running each of them once on a small example."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tomadiff.core import Plan, exact_products, make_plan, partition, similarity, slot_layout, unit_vectors

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
    ratio: float = 0.5,
    channels: int = 80,
    regression: bool | None = True,
) -> str | None:
    """What the kernels do wrong in this dtype, in words; None if nothing.

    regression: whether weights for unmerging are made by regression, or None to leave weights out.

    The default example has ragged tiles, and channels that don't fill the last block.
    """
    generator = torch.Generator().manual_seed(0)
    # "cpu", as the generator is: the user may have set another default device
    noise = torch.randn(2, math.prod(grid), channels, generator=generator, device="cpu")
    # Similar tokens share weights: where each has but one destination, rounding would change nothing.
    features, x = (tokens.to(device, dtype) for tokens in (1 + 0.3 * noise, noise))
    with torch.no_grad(), torch.autocast(device.type, enabled=False), exact_products():
        regions = partition(grid, kind, size, False, device)
        slots = slot_layout(regions.lengths, ratio, device)
        plan = make_plan(features, regions, slots, SCALE, "regression" if regression else "transpose")
        chosen = destinations(features, regions, slots)
        if not bool(((chosen >= 0) & (chosen < regions.tokens)).all()):
            return "choose tokens that there are not"
        # compare coverage, not tokens: rounding may decide between two tokens that are equally good
        coverage, best = _coverage(features, plan, chosen), _coverage(features, plan, plan.destinations)
        if not torch.allclose(coverage, best, rtol=1e-4):
            return "choose worse destinations than core"
        if regression is not None:
            matrices = weights(features, regions, slots, plan.destinations, SCALE, regression)
            if not _same_weights(matrices, plan):
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


def example(places: int, slots: int) -> tuple[tuple[int, int], str, tuple[int, int], float]:
    """A grid, kind and size of regions, and a ratio, that need blocks of so many places and slots.

    Without filling them evenly.
    """
    rows = 1 << (places.bit_length() - 1) // 2
    columns = places // rows
    return (rows, 2 * columns - 3), "tile", (rows, columns), 1 - 0.75 * slots / places


def _coverage(x: Tensor, plan: Plan, chosen: Tensor) -> Tensor:
    """The objective that destinations maximise: similarity to the nearest one, summed over each region."""
    cosines = similarity(plan.regions.split(plan.regions.arrange(unit_vectors(x))))
    picks = plan.regions.places_of(plan.slots.unpack(chosen))
    nearest = cosines.gather(1, picks[..., None].expand(-1, -1, cosines.shape[-1])).amax(1)
    real = plan.regions.real
    return (nearest if real is None else nearest * real.repeat(len(x), 1)).sum(-1)


def _same_weights(matrices: tuple[Tensor, Tensor, Tensor], plan: Plan) -> bool:
    """Whether a plan's matrices are equal up to rounding, which a sharp softmax multiplies by its scale.

    In fp32, kernels and core differ by 1e-4 at most, and features in TF32 change assignments by 2.7e-3.
    Rows of unmerging that are padding may be anything: nobody reads them.
    """
    assignment, merging, unmerging = matrices
    real, expected = plan.regions.real, plan.unmerging
    if real is not None:
        padding = real.repeat(len(plan.destinations), 1)[..., None]
        unmerging, expected = unmerging * padding, expected * padding
    error = 2e-3 + 2 * torch.finfo(merging.dtype).eps
    return (
        _close(assignment, plan.assignment, 1e-3)
        and _close(merging, plan.merging, error)
        and _close(unmerging, expected, error)
    )


def _close(found: Tensor, expected: Tensor, error: float | None = None) -> bool:
    """Whether two results are equal, by default up to the dtype's rounding and the order of summation."""
    error = 8 * torch.finfo(found.dtype).eps if error is None else error
    return torch.allclose(found.float(), expected.float(), rtol=error, atol=error)
