"""The plans of a generation: whom each serves, how old it is, and when it is made anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tomadiff.core import MergePlan, RefreshSchedule


class PlanKey(NamedTuple):
    """Whom a plan serves: sites of a kind, or one by name, in one of the calls of a step, on such tokens."""

    block: str  # the class of block
    kind: str
    name: str | None
    ratio: float
    grid: tuple[int, ...]
    shifted: bool
    call: int
    visit: int  # of the site in the call
    batch: int
    dtype: torch.dtype
    device: torch.device


@dataclass
class KeptPlan:
    """A plan, with what sites need of it and the steps at which its two parts were made."""

    plan: MergePlan
    key_bias: Tensor | None  # [B, K] to add to the logits of merged keys
    destinations_step: int
    weights_step: int
    used_step: int  # the last step that it served


def tensors_of(plan: Any) -> list[Tensor]:
    """Those of a plan, and of a plan inside it."""
    tensors: list[Tensor] = []
    for value in vars(plan).values():
        if isinstance(value, Tensor):
            tensors.append(value)
        elif hasattr(value, "merge"):
            tensors += tensors_of(value)
    return tensors


# Given destinations [B, K] to keep, or None to choose them: a plan, and the bias of its keys
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
        """The plan at hand, or one that is made now, all of it or only its weights."""
        kept = self.get(key)
        due = self.due(kept, step)
        if kept is None or due is not None:
            same = kept.plan.destinations if kept is not None and due == "weights" else None
            plan, key_bias = make(same)
            chosen = step if kept is None or due == "destinations" else kept.destinations_step
            kept = self[key] = KeptPlan(plan, key_bias, chosen, step, step)
            self.refreshes["destinations" if same is None else "weights"] += 1
        kept.used_step = step
        return kept

    def due(self, kept: KeptPlan | None, step: int) -> str | None:
        """What has to be made anew at a step, "destinations" or "weights"; None if nothing."""
        if kept is None:
            return "destinations"
        return self.schedule.due(step - kept.destinations_step, step - kept.weights_step)
