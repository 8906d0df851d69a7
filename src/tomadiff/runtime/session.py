"""tomadiff on one model: what happens around each of the model's calls."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tomadiff.config import Config
from tomadiff.errors import ConfigError, UnsupportedModelError
from tomadiff.models import Call, Family, Site, family_of

from . import autotune
from .call_guard import CallGuard
from .capture import check_not_captured
from .clock import Clock
from .conditions import scale_of_controlnet
from .conflicts import (
    Surroundings,
    check_attention,
    check_checkpointing,
    check_model,
    records_attention,
)
from .forecast import History
from .generation import Generation
from .hook import SiteCalls, SiteHook, join_spans, parameter_names
from .layout import Layout
from .long_keys import long_keys
from .model_call import DENSE, ModelCall, SiteTask
from .plan_cache import PlanCache
from .prediction import NoisyInput, Prediction, prediction_of
from .schedule import RatioSchedule
from .sites import find
from .timing import Times
from .tolerance import Tolerance

SESSION = "_tomadiff"  # the model's attribute that holds its Session
ZERO = torch.zeros(())
# usual names of arguments with a timestep
TIMES = ("timestep", "timesteps", "t", "r", "timestep_r", "sigma", "sigmas")


class Session:
    """A model's settings, its sites and the current generation. `registration` attaches it to the model.

    It is called in place of the model, so a step that doesn't run skips everything that is on the model.
    """

    def __init__(
        self,
        model: nn.Module,
        family: Family | None,
        config: Config,
        pipeline: Any = None,
        made_for: str | None = None,
    ) -> None:
        self.model, self.family = model, family
        self.asked, self.config = config, config.resolve(family)
        self.parameters = parameter_names(model)
        self.compiled: Callable[..., Any] | None = None  # the model as `model.compile()` left it
        self.time = family.time if family else next((name for name in TIMES if name in self.parameters), None)
        self.clock = Clock(pipeline, bool(family and family.ascending))
        self.sites: list[SiteHook] = []
        self.unmerged: str | None = None  # why nothing can be merged in this model
        if self.config.merges:
            self._find_sites()
        self.hooks = self.sites  # these, and those that are added for long sequences
        self.long_keys = long_keys(self)
        self.surroundings = Surroundings(model, self.sites)
        self.tolerance = Tolerance(self)
        self.made_for = made_for  # model class of the settings file, if it differs from this model's
        self.guard = CallGuard()
        self.generation: Generation | None = None
        self.call: ModelCall | None = None  # the call that is running
        self.keeps_plans = False  # keep plans after the last step, for tools that read them
        self.answers: dict[autotune.Situation, autotune.Answer] = {}  # what auto found
        self.watched: list[tuple[nn.Module, Callable[..., None]]] = []  # blocks, and pre-hooks on them
        self.counts, self.site_calls, self.times = Counts(), SiteCalls(), Times()  # for the report

    # a compiler that traces a call of the model must not trace what happens around it
    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called in place of the model: run it, or forecast its output."""
        self._enter()
        try:
            turn = self._begin(args, kwargs)
            if turn.call is None:
                _compiled_frame(ZERO)
                output = turn.forecast
            elif self.tolerance.is_unknown(turn.call):
                call, output = self.tolerance.find_out(turn.call, args, kwargs)
                turn = turn._replace(call=call)
            else:
                output = self.run(turn.call, args, kwargs)
            self._end(turn, output)
        except BaseException:
            self._broke_off()
            raise
        return output

    @torch.compiler.disable(recursive=False)
    def run(self, call: ModelCall, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the model with its sites doing what `call` says. This does not count as a step."""
        outer, self.call = self.call, call
        start = time.perf_counter()
        try:
            output = (self.compiled or self.model._call_impl)(*args, **kwargs)
        finally:
            self.call = outer
        call.times.seconds["model"] += time.perf_counter() - start
        if call.spans:
            raise UnsupportedModelError(
                "a block was left out of its span, so that tokens came back merged: something else skips "
                'blocks of this model; use where="module" beside it'
            )
        return output

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Replaces `model.compile`: compiles the model inside this session."""
        self.compiled = torch.compile(self.model._call_impl, *args, **kwargs)

    @property
    def pipeline(self) -> Any:
        """The pipeline that was given to `apply`; None for a bare model, or once the pipeline is gone."""
        return self.clock.current_pipeline()

    @property
    def is_compiled(self) -> bool:
        """Whether the model is compiled, as a whole or block by block."""
        parts = getattr(self.pipeline, "__dict__", {}).values()
        wrapped = any(getattr(part, "_orig_mod", None) is self.model for part in parts)
        return wrapped or self.compiled is not None or self.has_compiled_blocks

    @property
    def has_compiled_blocks(self) -> bool:
        return any(hook.compiler.settings is not None for hook in self.sites)

    @property
    def plans(self) -> PlanCache:
        """The plans of the current generation; empty without one."""
        return self.generation.plans if self.generation else PlanCache(self.config.refresh)

    @property
    def ratios(self) -> RatioSchedule:
        """The ratios of the current generation; without one, nothing is merged."""
        return self.generation.schedule.ratios if self.generation else RatioSchedule()

    def require_call(self, site: SiteHook) -> ModelCall:
        """The call of the model that a site is in."""
        if self.call is None:
            raise ConfigError(
                f"{site.bound.name} was called from outside a call of its model, which merging has to see: "
                "call the model itself, not its forward and not its blocks, or tomadiff.remove first"
            )
        return self.call

    @torch.compiler.disable
    def _enter(self) -> None:
        check_not_captured()
        if not self.guard.enter():
            self.forget()

    @torch.compiler.disable
    def _begin(self, args: tuple, kwargs: dict[str, Any]) -> Turn:
        """Find out which step this call belongs to, and forecast its output or prepare the sites."""
        arguments = dict(zip(self.parameters, args)) | kwargs
        generation, clock = self._take_a_step(arguments), self.clock
        history = generation.history(clock.step, clock.call, lambda: self._conditions(arguments))
        noisy = generation.noisy(clock.step, arguments.get(self.parameters[0]))
        if history is not None and history.ready and not generation.schedule.runs(clock.step):
            return Turn(history, noisy, forecast=history.forecast(clock.step, noisy))
        generation.run(clock.step)
        return Turn(history, noisy, self._new_call(arguments, generation))

    @torch.compiler.disable
    def _end(self, turn: Turn, output: Any) -> None:
        """Add the output to the history, and update the counts."""
        call = turn.call
        if call is not None:
            if turn.history is not None:
                turn.history.add(call.step, output, turn.noisy)
            if self.long_keys is not None:
                self.long_keys.conclude()
            self.site_calls.add(self.hooks, call)
            if self.config.where == "kv" and self._merged_nowhere(call):
                raise UnsupportedModelError(
                    "no keys and values were merged: something replaced the attention of this model"
                )
        self.counts.add(self.clock, skipped=call is None)
        if self.generation is not None and not self.keeps_plans:
            self.generation.let_go_after_last(self.clock.step, self.clock.call)
        self.guard.leave()

    def _merged_nowhere(self, call: ModelCall) -> bool:
        if any(call.ran) or not any(task.merged for task in call.tasks):
            return False
        self.site_calls.settle()
        return not any(hook.counts.calls for hook in self.sites)

    @torch.compiler.disable
    def _broke_off(self) -> None:
        """Reset after an exception, since the generation can't continue from here."""
        self.guard.leave()
        self.forget()

    def watch_block_inputs(self) -> None:
        """Record the input of blocks whose modules plan from it; sites that are blocks see it themselves."""
        modules = [hook for hook in self.sites if hook.site.path]
        inside = {hook.bound.block: hook for hook in modules if hook.planner.method.from_block_input}
        blocks = self.family.blocks if self.family else ()
        wholes = {part.name: part.whole or Site("block") for part in blocks}
        for block, hook in inside.items():
            keep = functools.partial(hook.before_block, wholes[type(block).__name__], parameter_names(block))
            self.watched.append((block, keep))  # before it is registered, so that an interrupt loses none
            block.register_forward_pre_hook(keep, with_kwargs=True)

    def forget(self) -> None:
        """Drop all tensors; the next call starts a new generation."""
        self.clock.forget()
        self.call = None
        if self.long_keys is not None:
            self.long_keys.cancel()
        if self.generation is not None:
            self.generation.end()
        self.generation = None

    def found(self) -> list[str]:
        """What was measured, for the report."""
        of_keys = self.long_keys.found() if self.long_keys else ()
        return [*map(str, self.answers.values()), *self.tolerance.found(), *of_keys]

    def held(self) -> int:
        """Bytes of the plans and outputs that are kept from step to step."""
        tensors = [] if self.generation is None else self.generation.held()
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        return sum(storages.values())

    def _find_sites(self) -> None:
        try:
            family = self.family or family_of(self.model)  # raises an error that says why there is none
            found = find(self.model, family, self.config)
            self.sites = [SiteHook(self.config, bound, index) for index, bound in enumerate(found)]
        except (ConfigError, UnsupportedModelError) as error:
            # raise if merging was requested, or if nothing else is possible: a bare model can't be forecast
            if not self.config.merges_as_fallback or self.clock.pipeline is None:
                raise
            self.unmerged = str(error)
        if self.config.where == "span":
            join_spans(self.sites)

    def _take_a_step(self, arguments: Call) -> Generation:
        """Advance the clock, which tells whether this is a new generation, a new step or a further call."""
        number = self.clock.generation
        self.clock.tick(arguments.get(self.time or ""), arguments.get(self.parameters[0]))
        if self.clock.generation != number or self.generation is None:
            self.generation = self._new_generation()
        elif self.clock.step:
            self.generation.look_at_first_step()
        self.counts.why = self.generation.schedule.why
        return self.generation

    def _new_generation(self) -> Generation:
        if self.generation is not None:
            self.generation.end()
        steps = None if torch.is_grad_enabled() else self.clock.steps()
        generation = Generation(
            self.config,
            self.model,
            self.family,
            self.clock.scheduler,
            steps,
            0 if steps is None else self.clock.skipped(),
            None if steps is None else self._prediction(),
            self._obstacle(),
            self.counts.refreshes,
        )
        self._warn_of_what_is_not_done(generation)
        if generation.first and self.pipeline is not None:
            self._take_over(generation.first)
        return generation

    def _take_over(self, first: int) -> None:
        """Let go of what the pipeline's model of the first steps holds; Wan 2.2 has another for the last."""
        others = [getattr(part, SESSION, None) for part in vars(self.pipeline).values()]
        for other in filter(None, others):
            generation = other.generation
            if generation is not None and generation.first + other.clock.step < first:
                generation.let_go()

    def _prediction(self) -> Prediction | None:
        """How the model's outputs are related to clean images, if that is needed and known."""
        if self.config.interval == 1:
            return None
        return prediction_of(
            self.pipeline, self.clock.scheduler, self.family.output_sign if self.family else 1
        )

    def _obstacle(self) -> str | None:
        """Why no step of this generation may be skipped."""
        if torch.is_grad_enabled():
            return "gradients are recorded"
        if self.model.training:
            return "the model is in training mode (model.eval() ends it)"
        recorder = records_attention(self.model)
        return f"{recorder} records attention in every step" if recorder else None

    def _conditions(self, arguments: Call) -> Call:
        """All arguments of a call except the noisy image and the timestep, and what else conditions it."""
        changing = (self.parameters[0], self.time, *TIMES)
        conditions = {name: value for name, value in arguments.items() if name not in changing}
        return conditions | {"scale of the ControlNet": scale_of_controlnet(self.pipeline)}

    def _warn_of_what_is_not_done(self, generation: Generation) -> None:
        """Warn if settings have no effect in the generation that begins."""
        schedule, config = generation.schedule, self.config
        if config.interval == "auto" and schedule.merges and self.unmerged:
            warn(f"nothing is done here: {schedule.why}, and tokens can't be merged: {self.unmerged}")
        elif schedule.skips and config.interval != "auto" and generation.forecasts_noise:
            noise = generation.sampling.noise
            warn(f"{noise}, which no forecast can know: use ratio=0.5 instead of interval, or neither")
        if torch.is_grad_enabled() and len(config.ranges()) > 1:
            raise ConfigError("a ratio by range of steps can't be honoured in training, which has no steps")
        groups = {autotune.group_of(hook) for hook in self.sites}
        running = [step for step in range(schedule.steps or 0) if schedule.runs(step)]
        merged = any(schedule.ratios.at(step, *group) for step in running for group in groups)
        wanted = schedule.merges and any(schedule.ratios.ever(*group) for group in groups)
        if running and wanted and not merged:
            warn(
                f"nothing is merged: all {schedule.steps} steps of this generation are dense with "
                f"ratio={config.ratio}; let a range with a ratio begin earlier"
            )

    def _new_call(self, arguments: Call, generation: Generation) -> ModelCall:
        """What each site does in this call."""
        found: tuple[Layout, Sequence[SiteTask]] | None = None
        shifted = generation.shifted
        self.surroundings.look(self.clock.step)
        family = self.family
        if self.sites and generation.schedule.merges and family and not family.reads(arguments):
            try:
                found = self._layout_and_tasks(family, arguments, generation)
                if self.tolerance.refuses(found[0]):
                    found = None
            except ConfigError as error:
                if not self.config.merges_as_fallback:  # merging was requested
                    raise
                why = generation.schedule.why
                warn(f"nothing is done here: {why}, and tokens can't be merged: {error}")
        elif self.long_keys is not None and generation.schedule.skips:
            found, shifted = self.long_keys.tasks(arguments, generation), False
        layout, tasks = found or (Layout(), self.dense_tasks())
        clock = self.clock
        return ModelCall(clock.step, clock.call, shifted, layout, tasks, generation.plans, self.times)

    def dense_tasks(self) -> Sequence[SiteTask]:
        return [DENSE] * len(self.hooks)

    def _layout_and_tasks(
        self, family: Family, arguments: Call, generation: Generation
    ) -> tuple[Layout, Sequence[SiteTask]]:
        """The layout and tasks of a call that merges, cached for similar calls; raises on conflicts."""
        if torch.is_grad_enabled():
            check_checkpointing(self.model)
        version = self.surroundings.version
        if version not in generation.tasks:
            check_model(self.model, self.sites)
            generation.tasks[version] = ()
        layout = generation.layouts.read(arguments, self.clock.call)
        cut = self._cut(family, arguments)
        off = autotune.decide(self, arguments, layout, cut).off if self.config.auto else frozenset()
        key = (layout, self.ratios.range(self.clock.step), off, cut, version)
        if key not in generation.tasks:
            generation.tasks[key] = self.merging_tasks(layout, cut, off)
        return layout, generation.tasks[key]

    def merging_tasks(
        self, layout: Layout, cut: bool, off: frozenset[autotune.Group] = frozenset()
    ) -> Sequence[SiteTask]:
        """The tasks of all sites at this step; sites of the groups in `off` stay dense."""
        ratios, tasks = self.ratios, []
        for hook in self.sites:
            group = autotune.group_of(hook)
            ratio = 0.0 if group in off else ratios.at(self.clock.step, *group)
            tasks.append(hook.task(layout, ratio, cut))
            if ratio:
                check_attention(hook)
        return tasks + [DENSE] * (len(self.hooks) - len(tasks))

    def _cut(self, family: Family, arguments: Call) -> bool:
        """Whether every block is a span of its own, because something between blocks needs all tokens."""
        return (
            family.skips
            or any(arguments.get(name) is not None for name in family.between_blocks)
            or self.surroundings.between_blocks
        )


class Turn(NamedTuple):
    """One call of the model as it begins: earlier outputs, and either the call to run or the forecast."""

    history: History | None
    noisy: NoisyInput
    call: ModelCall | None = None
    forecast: Any = None


class Counts:
    """Numbers of steps and calls of the model, run and forecast."""

    def __init__(self) -> None:
        self.calls = {"run": 0, "forecast": 0}
        self.steps = {"run": 0, "forecast": 0}
        self.generations = 0
        self.refreshes = {"destinations": 0, "weights": 0}  # whole plans made, and refreshes of weights
        self.why = ""  # the reason for the steps that the last generation ran

    def add(self, clock: Clock, skipped: bool) -> None:
        did = "forecast" if skipped else "run"
        self.calls[did] += 1
        self.steps[did] += clock.call == 0
        self.generations += clock.call == clock.step == 0


def warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def _compiled_frame(x: Tensor) -> Tensor:
    """Gives a compiled model something to compile in a skipped call, which torch.compile insists on."""
    return x + 1
