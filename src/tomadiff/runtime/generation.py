"""One generation: which of its steps run, and what is kept between steps. Dropping the object resets it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor, nn

from tomadiff.config import ResolvedConfig
from tomadiff.models import Call, Family

from .conditions import Adapters, Conditions
from .forecast import History
from .layout import Layout, LayoutReader
from .model_call import Group, SiteTask
from .plan_cache import PlanCache
from .prediction import NoisyInput, Prediction
from .sampling import FirstStepWatch, Sampling, sampling_of, watch_first_step
from .schedule import Schedule, make_schedule


class Generation:
    """One generation of one model. Each call of a step, by its number, has a history of its own.

    first: the entry of the scheduler's table that is step 0. prediction: of all entries, if known.
    refreshes: counts the plans that are made, for the report.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model: nn.Module,
        family: Family | None,
        scheduler: Any,
        steps: int | None,
        first: int,
        prediction: Prediction | None,
        obstacle: str | None,
        refreshes: dict[str, int],
    ) -> None:
        self._config, self._scheduler, self._obstacle = config, scheduler, obstacle
        self._steps, self.first, self._prediction = steps, first, prediction
        self._model, self._family = model, family
        self._watch: FirstStepWatch | None = None
        if config.interval != 1 and scheduler is not None:
            self._watch = watch_first_step(scheduler)
        self.sampling, self.schedule = self._plan({})
        self.plans = PlanCache(config.refresh, refreshes)
        self.layouts = LayoutReader(model, family)
        self.tasks: dict[Hashable, Sequence[SiteTask]] = {}  # tasks of all sites, by what they depend on
        self.merged_keys: dict[Layout, frozenset[Group]] = {}  # groups whose keys are merged, by layout
        self._histories: dict[int, tuple[Conditions, History]] = {}  # by number of the call in its step
        self._steps_run: set[int] = set()
        self._calls: dict[int, int] = {}  # number of calls in each step

    def look_at_first_step(self) -> None:
        """Revise the schedule if arguments of the scheduler's first step decide whether noise is added."""
        if self._watch is not None and self._watch.arguments is not None:
            self.sampling, self.schedule = self._plan(self._watch.arguments)
            self._watch = None

    def history(self, step: int, call: int, arguments: Callable[[], Call]) -> History | None:
        """The earlier outputs of this call of the step; a new history if its conditioning has changed.

        An earlier generation that ended after its first step, and began with the same noise, looks like a
        first call of step 0. Only its conditioning tells: plans are kept in step 1 only if that is the same.
        """
        skips = self.schedule.skips
        if not skips and step > 1:
            return None
        conditions, history = self._histories.get(call) or (Conditions(), History())
        if conditions.changed(arguments(), self._adapters.state()):
            history = History()
        if step == 1 and not conditions.same:
            self.plans.drop(call)
        if not skips and step == 1:
            self._histories.pop(call, None)  # which holds the arguments
            return None
        history.hold = self.sampling.known and not self.sampling.deterministic
        history.steps = self._steps
        history.may_repeat = conditions.same
        self._histories[call] = conditions, history
        return history if skips else None

    @property
    def forecasts_noise(self) -> bool:
        """Whether outputs are forecast though fresh noise is added, and are not known as clean images."""
        return bool(self.sampling.scheduler and self.sampling.noise) and self._prediction is None

    def noisy(self, step: int, sample: Any) -> NoisyInput:
        """The input of a call, which tells outputs from clean images."""
        terms = self._prediction.at(self.first + step) if self._prediction else None
        return NoisyInput(sample, terms)

    @functools.cached_property
    def _adapters(self) -> Adapters:
        return Adapters(self._model)

    def run(self, step: int) -> None:
        """Count a step that runs; called for each of its calls."""
        self._steps_run.add(step)

    @property
    def shifted(self) -> bool:
        """Whether regions are shifted in this step; they are in every other step that runs."""
        return self._config.shift and len(self._steps_run) % 2 == 0

    def let_go_after_last(self, step: int, call: int) -> None:
        """Drop all tensors after the last call of the last step, since decoding needs the memory.

        The last step is assumed to have as many calls as the step before; further calls make new plans.
        """
        self._calls[step] = call + 1
        last = self._steps is not None and step + 1 >= self._steps
        if last and self._calls[step] >= self._calls.get(step - 1, 0):
            self.let_go()

    def let_go(self) -> None:
        """Drop all tensors."""
        self.plans.clear()
        self._histories.clear()
        self.layouts = LayoutReader(self._model, self._family)

    def held(self) -> list[Tensor]:
        """The tensors of plans and forecasts."""
        tensors = [x for kept in self.plans.values() for x in kept.tensors()]
        return tensors + [x for _, history in self._histories.values() for x in history.tensors()]

    def end(self) -> None:
        """Remove the watch from the scheduler."""
        if self._watch is not None:
            self._watch.remove()

    def _plan(self, step_arguments: dict[str, Any]) -> tuple[Sampling, Schedule]:
        sampling = sampling_of(self._scheduler, step_arguments)
        known = self._prediction is not None
        return sampling, make_schedule(
            self._config, self._steps, self.first, sampling, self._obstacle, image_is_known=known
        )
