"""ToMA: facility-location destinations, merging as attention (arXiv 2509.10918)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tomadiff import kernels
from tomadiff.core import MergePlan, Plan, make_plan, num_kept, partition, slot_layout

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
    layout = grid, settings.regions, settings.region_size
    regions = partition(*layout, shifted, features.device)
    if settings.shift:
        partition(*layout, not shifted, features.device)
    slots = slot_layout(regions.lengths, ratio, features.device)
    regression = regression_by_kernel(settings, regions.size, slots.size)
    usable = kernels.usable(features, regions.size, slots.size, regression)
    if usable:
        from tomadiff.kernels import plan as by_kernels  # brings Triton

        if destinations is None:
            destinations = by_kernels.destinations(features, regions, slots)
        if regression is not None:
            matrices = by_kernels.weights(features, regions, slots, destinations, settings.scale, regression)
            return by_kernels.Fused(Plan(regions, slots, destinations, *matrices))
    plan = make_plan(
        features,
        regions,
        slots,
        settings.scale,
        settings.unmerge,
        assign_globally=settings.assign == "global",
        destinations=destinations,
    )
    if usable and kernels.usable(features, plan.regions.size, plan.slots.size):
        return by_kernels.Fused(plan)
    return plan


def regression_by_kernel(settings: PlanSettings, size: int, kept: int) -> bool | None:
    """Whether the kernel that makes weights does so by regression; None if core makes them.

    In regions of `size` tokens, of which up to `kept` are destinations.
    """
    regression = settings.unmerge == "regression"
    too_large = size > kernels.LARGEST_WEIGHED or (regression and kept > kernels.LARGEST_SOLVED)
    if too_large or settings.assign == "global" or settings.unmerge == "pinv":
        return None
    return regression


def length(grid: tuple[int, ...], ratio: float, settings: PlanSettings) -> int:
    regions = partition(grid, settings.regions, settings.region_size, False, torch.device("cpu"))
    return sum(num_kept(tokens, ratio) for tokens in regions.lengths)


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
