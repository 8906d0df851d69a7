"""The plans of a generation: whom each serves, how old it is, and when it is made anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tomadiff.core import MergePlan, Schedule


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


class Plans(dict[PlanKey, KeptPlan]):
    """Those that are kept, and how many were made."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.schedule = schedule
        self.refreshes = {"destinations": 0, "weights": 0}  # whole plans, and those with new weights only

    def due(self, kept: KeptPlan | None, step: int) -> Literal["destinations", "weights"] | None:
        """What has to be made anew at a step, of a plan or where there is none yet."""
        if kept is None:
            return "destinations"
        return self.schedule.due(step - kept.destinations_step, step - kept.weights_step)

    def keep(
        self, key: PlanKey, plan: MergePlan, key_bias: Tensor | None, step: int, *, new_weights_only: bool
    ) -> KeptPlan:
        """Take over a plan that was made at a step, in the place of the one before."""
        self.refreshes["weights" if new_weights_only else "destinations"] += 1
        destinations_step = self[key].destinations_step if new_weights_only else step
        self[key] = KeptPlan(plan, key_bias, destinations_step, step)
        return self[key]
