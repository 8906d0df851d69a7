"""Which tokens went where: the plans of a generation, recorded while it runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tomadiff.errors import ConfigError, NotPatchedError
from tomadiff.runtime.registration import denoiser, session_of


@dataclass(frozen=True)
class MergeMap:
    """A plan for one sample at one step, as it is drawn. For a video, draw single frames (`frame`)."""

    step: int
    kind: str
    grid: tuple[int, ...]
    destinations: Tensor  # [K] token numbers
    owners: Tensor  # [N] the destination of each token
    regions: Tensor  # [N] the number of the region that each token was assigned in

    def frame(self, number: int) -> MergeMap:
        """The map of one frame of a video. Owners in other frames get negative numbers, each its own."""
        size = math.prod(self.grid[-2:])
        if len(self.grid) != 3 or not 0 <= number < self.grid[0]:
            raise ValueError(f"no frame {number} on a grid of {' x '.join(map(str, self.grid))}")
        inside = slice(number * size, (number + 1) * size)
        destinations, owners = self.destinations - inside.start, self.owners[inside] - inside.start
        return MergeMap(
            step=self.step,
            kind=self.kind,
            grid=self.grid[-2:],
            destinations=destinations[(destinations >= 0) & (destinations < size)],
            owners=torch.where((owners >= 0) & (owners < size), owners, -1 - self.owners[inside]),
            regions=self.regions[inside],
        )


class Recorder:
    """Keeps the merge maps of chosen steps, or of all. Hand it to a pipeline as `callback_on_step_end`."""

    def __init__(self, target: Any, steps: Iterable[int] | None = None, sample: int = -1) -> None:
        patch = session_of(denoiser(target)[0])
        if patch is None:
            raise NotPatchedError("nothing to map: call tomadiff.apply first")
        if patch.config.plan.regions in ("stripe", "global"):
            raise ConfigError('a merge map needs a grid of tokens: use regions="tile"')
        self.patch = patch
        self.steps, self.sample = steps if steps is None else set(steps), sample
        self.patch.keeps_plans = True  # the last step's are read after it has ended
        self.seen = 0  # number of steps so far
        self.maps: list[MergeMap] = []

    def __call__(self, pipe: Any, step: int, timestep: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        self.seen += 1
        if self.steps is None or step in self.steps:
            self.maps += self._current(step)
        return inputs

    def first_middle_last(self) -> list[MergeMap]:
        """Three maps: of the first, a middle and the last step that merged tokens."""
        return [self.maps[0], self.maps[len(self.maps) // 2], self.maps[-1]]

    def _current(self, step: int) -> list[MergeMap]:
        """The plan at the finest grid, first kind of site; none in a step that was left dense."""
        generation, now = self.patch.generation, self.patch.clock.step
        plans = {} if generation is None else generation.plans
        used = [key for key, kept in plans.items() if key.call == 0 and kept.used_step == now]
        if not used:
            return []
        finest = max(used, key=lambda key: math.prod(key.grid))
        plan = plans[finest].plan
        regions = torch.zeros(math.prod(finest.grid), dtype=torch.long)
        layout = getattr(plan, "regions", None)  # only plans of some methods have regions
        if layout is not None:
            numbers = torch.arange(layout.count).repeat_interleave(layout.size).reshape(1, -1, 1)
            regions = layout.restore(numbers.to(plan.destinations.device)).flatten().cpu()
        return [
            MergeMap(
                step=step,
                kind=finest.kind,
                grid=finest.grid,
                destinations=plan.destinations[self.sample].cpu(),
                owners=plan.owners()[self.sample].cpu(),
                regions=regions,
            )
        ]
