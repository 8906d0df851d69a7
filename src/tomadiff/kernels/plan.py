"""core's plan, with merging and unmerging done by kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tomadiff import kernels
from tomadiff.core import Plan, Regions

from .launch import Repeats, repeats_of
from .merge import merge, unmerge
from .select import destinations
from .weights import weights

__all__ = ["Fused", "destinations", "weights"]


@dataclass(frozen=True)
class Fused:
    """A plan whose kernels read and write tokens in image order, without `arrange` and `restore`."""

    plan: Plan

    @cached_property
    def repeats(self) -> Repeats:
        return repeats_of(self.plan.regions, self.plan.slots)

    @property
    def regions(self) -> Regions:
        return self.plan.regions

    @property
    def destinations(self) -> Tensor:
        return self.plan.destinations

    def merge(self, x: Tensor) -> Tensor:
        if _trained(x):
            return self.plan.merge(x)
        return merge(self.plan, x, self.repeats)

    def unmerge(self, y: Tensor, onto: Tensor | None = None, merged: Tensor | None = None) -> Tensor:
        if _trained(y, onto, merged):
            return self.plan.unmerge(y, onto, merged)
        return unmerge(self.plan, y, onto, merged, self.repeats)

    def cast(self, dtype: torch.dtype) -> Fused | Plan:
        """The plan for tokens of another dtype than the features'; core's if kernels don't work in it."""
        plan = self.plan.cast(dtype)
        if plan is self.plan:
            return self
        return Fused(plan) if kernels.usable(plan.merging, plan.regions.size, plan.slots.size) else plan

    def owners(self) -> Tensor:
        return self.plan.owners()

    def log_sizes(self) -> Tensor:
        return self.plan.log_sizes()


def _trained(*tensors: Tensor | None) -> bool:
    """Whether autograd needs gradients, which the kernels don't provide."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
