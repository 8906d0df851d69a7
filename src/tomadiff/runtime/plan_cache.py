"""The plans of a generation: which sites share one, how old it is, and when it is refreshed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tomadiff.core import MergePlan, RefreshSchedule


class PlanKey(NamedTuple):
    """Sites with equal keys share a plan."""

    block: str  # class of the block
    kind: str  # kind of the site
    name: str | None  # name of the site or block; None if all sites of a kind share plans
    ratio: float
    grid: tuple[int, ...]
    shifted: bool
    call: int  # number of the call within its step
    visit: int  # how often the site has merged in this call before
    batch: int
    dtype: torch.dtype
    device: torch.device


@dataclass
class KeptPlan:
    """A plan, the bias of its keys, and the steps at which its two parts were computed."""

    plan: MergePlan
    key_bias: Tensor | None  # [B, K] bias to add to the logits of merged keys
    destinations_step: int
    weights_step: int
    used_step: int  # the last step that used it
    # rows of per-token tables for the destinations, by the table's length and its entries before the image's
    places: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        bias = [] if self.key_bias is None else [self.key_bias]
        return [*tensors_of(self.plan), *self.places.values(), *bias]


def tensors_of(plan: Any) -> list[Tensor]:
    """The tensors of a plan, and of a plan inside it."""
    tensors: list[Tensor] = []
    for value in vars(plan).values():
        if isinstance(value, Tensor):
            tensors.append(value)
        elif hasattr(value, "merge"):
            tensors += tensors_of(value)
    return tensors


# make(destinations): a plan with these destinations, [B, K], or new ones if None; and the bias of its keys
MakePlan = Callable[[Tensor | None], tuple[MergePlan, Tensor | None]]


class PlanCache(dict[PlanKey, KeptPlan]):
    """The plans of one generation.

    refreshes: counts the plans that are made, whole ("destinations") and with new "weights" only.
    """

    def __init__(self, schedule: RefreshSchedule, refreshes: dict[str, int] | None = None) -> None:
        super().__init__()
        self.schedule = schedule
        self.refreshes = {"destinations": 0, "weights": 0} if refreshes is None else refreshes

    def get_or_make(self, key: PlanKey, step: int, make: MakePlan) -> KeptPlan:
        """The cached plan, with its weights or the whole plan recomputed if that is due."""
        kept = self.get(key)
        due = self.due(kept, step)
        if kept is None or due == "destinations":
            kept = self[key] = KeptPlan(*make(None), step, step, step)
            self.refreshes["destinations"] += 1
        elif due == "weights":
            new = make(kept.plan.destinations)
            kept = self[key] = KeptPlan(*new, kept.destinations_step, step, step, kept.places)
            self.refreshes["weights"] += 1
        kept.used_step = step
        return kept

    def drop(self, call: int) -> None:
        """Drop the plans of one call of the steps."""
        for key in [key for key in self if key.call == call]:
            del self[key]

    def due(self, kept: KeptPlan | None, step: int) -> str | None:
        """What has to be recomputed at a step: "destinations", "weights" or None."""
        if kept is None:
            return "destinations"
        return self.schedule.due(step - kept.destinations_step, step - kept.weights_step)
