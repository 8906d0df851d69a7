"""What a site remembers of its dense steps, and forecasts from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .plan_cache import KeptPlan


@dataclass
class Line:
    """A change of tokens that is known at one step, and goes on from there at a steady pace."""

    step: int
    change: Tensor
    slope: Tensor | None = None  # by step

    def at(self, step: int) -> Tensor:
        if self.slope is None or step == self.step:
            return self.change
        return torch.add(self.change, self.slope, alpha=step - self.step)


@dataclass
class Memory:
    """What a site did to each token in its last dense steps, as a forecast of what it does next."""

    dense: Line  # in the image's order
    # from the first merged step on, for the plan of that step: the same in the order of the plan's regions,
    # and what the site is expected to do to merged tokens
    kept: KeptPlan | None = None
    whole: Line | None = None
    merged: Line | None = None

    @classmethod
    def of(cls, step: int, change: Tensor, last: Memory | None) -> Memory:
        """After a dense step, with what is remembered of the one before."""
        slope = (change - last.dense.change) / (step - last.dense.step) if last else None
        return cls(Line(step, change, slope))

    def change(self, kept: KeptPlan, merged: Tensor, step: int) -> Tensor:
        """What the site does to every token: as forecast from dense steps, corrected by the merged tokens.

        Merged tokens are off themselves, since what a site does to a mean is not the mean of what it does.
        But they are so at every step in much the same way: so they tell how the forecast goes wrong, from
        the first merged step on.
        """
        if self.kept is not kept:
            self._begin(kept, merged, step)
            return self.whole.change
        return kept.plan.unmerge(merged, self.whole.at(step), self.merged.at(step))

    def _begin(self, kept: KeptPlan, merged: Tensor, step: int) -> None:
        dense, plan = self.dense, kept.plan
        if self.kept is not None and self.whole.slope is not None:  # a cache left the last dense step out
            dense = Line(dense.step, dense.change, self.kept.plan.regions.restore(self.whole.slope))
        slope = None if dense.slope is None else plan.regions.arrange(dense.slope)
        self.kept, self.dense = kept, Line(dense.step, dense.change)  # its slope lives on in the others
        self.whole = Line(step, plan.regions.arrange(dense.at(step)), slope)
        self.merged = Line(step, merged.detach(), None if slope is None else plan.merge(slope))
