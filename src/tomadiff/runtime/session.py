"""tomadiff on one model: what happens around each call of it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tomadiff.config import Config
from tomadiff.errors import ConfigError, UnsupportedModelError
from tomadiff.models import Call, Family, Site, family_of

from . import autotune
from .call_guard import CallGuard
from .clock import Clock
from .conflicts import act_between_blocks, check_attention, check_model, records_attention
from .forecast import History
from .generation import Generation
from .hook import SiteHook, join_runs, parameter_names
from .layout import Layout
from .sites import find
from .state import State

ZERO = torch.zeros(())
# names that models give to arguments that tell the time
TIMES = ("timestep", "timesteps", "t", "r", "timestep_r", "sigma", "sigmas")


class Session:
    """A model's settings, its sites and the generation under way. `registration` puts it on the model.

    It is called in the model's place: a step that doesn't run costs nothing of what is on the model.
    """

    def __init__(self, model: nn.Module, family: Family | None, config: Config, pipeline: Any = None) -> None:
        self.model, self.family, self.config = model, family, config
        self.parameters = parameter_names(model)
        self.compiled: Callable[..., Any] | None = None  # the model as `model.compile()` left it
        self.time = family.time if family else next((name for name in TIMES if name in self.parameters), None)
        self.state = State(config, Clock(pipeline, bool(family and family.ascending)), Layout(model, family))
        self.sites: list[SiteHook] = []
        self.unmerged: str | None = None  # why nothing can be merged in this model
        if config.merges:
            self._find_sites()
        self.made_for: str | None = None  # the class of models that its settings file is about, if not this
        self.guard = CallGuard()
        self.generation: Generation | None = None
        self.trial: bool | None = None  # while auto measures, whether this call is dense; it is no step
        self.answers: dict[autotune.Situation, autotune.Answer] = {}  # what auto found
        self.watched: list[tuple[nn.Module, Callable[..., None]]] = []  # blocks, with what sees their input
        self.counts = Counts()  # for the report

    # a compiler that follows a call of the model must not follow what happens around it
    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the model: run it, or forecast what it would give."""
        self._enter()
        try:
            call = self._begin(args, kwargs)
            if call.skipped:
                _compiled_frame(ZERO)
            else:
                call.output = (self.compiled or self.model._call_impl)(*args, **kwargs)
            self._end(call)
        except BaseException:
            self._broke_off()
            raise
        return call.output

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As `model.compile`, which is about what is inside of this."""
        self.compiled = torch.compile(self.model._call_impl, *args, **kwargs)

    @torch.compiler.disable
    def _enter(self) -> None:
        if self.trial is None and not self.guard.enter():
            self.forget()

    @torch.compiler.disable
    def _begin(self, args: tuple, kwargs: dict[str, Any]) -> ModelCall:
        """See where in a generation this call is, and forecast its output or make the sites ready."""
        arguments = dict(zip(self.parameters, args)) | kwargs
        if self.trial is not None:
            self._prepare_sites(arguments)
            return ModelCall()
        self._take_a_step(arguments)
        generation, clock = self.generation, self.state.clock
        call = ModelCall(generation.history(clock.call, self._conditions(arguments)))
        if call.history is not None and call.history.ready and not generation.schedule.runs(clock.step):
            call.skipped, call.output = True, call.history.forecast(clock.step)
        else:
            generation.run(clock.step)
            self._prepare_sites(arguments)
        return call

    @torch.compiler.disable
    def _end(self, call: ModelCall) -> None:
        """Learn from the output, and see that all tokens came back."""
        if not call.skipped:
            self.state.end_call()
            self.state.times.end_call()
            if call.history is not None:
                call.history.add(self.state.clock.step, call.output)
            for hook in self.sites:
                if hook.ran:
                    hook.count()
            self._check_tokens_came_back()
        if self.trial is None:
            self.counts.add(self.state.clock, call.skipped)
            self.guard.leave()

    @torch.compiler.disable
    def _broke_off(self) -> None:
        """An exception ended the call on the way: nobody goes on from here."""
        self.state.end_call()
        if self.trial is None:
            self.guard.leave()
        self.forget()

    def watch_block_inputs(self) -> None:
        """Where modules in a block need what went into it; whole blocks see that themselves."""
        if not self.state.from_input:
            return
        inside = {hook.place.block: hook for hook in self.sites if hook.site.path}
        wholes = {part.name: part.whole or Site("block") for part in self.family.blocks}
        for block, hook in inside.items():
            keep = functools.partial(hook.before_block, wholes[type(block).__name__], parameter_names(block))
            self.watched.append((block, keep))  # before it is on, so that an interrupt loses none
            block.register_forward_pre_hook(keep, with_kwargs=True)

    def forget(self) -> None:
        """Let go of all tensors; whatever comes next is a new generation."""
        self.state.forget()
        if self.generation is not None:
            self.generation.end()
        self.generation = None
        for hook in self.sites:
            hook.run.clear()

    def _find_sites(self) -> None:
        try:
            if self.family is None:
                family_of(self.model)  # says why there is none
            self.sites = [SiteHook(self.state, place) for place in find(self.model, self.family, self.config)]
        except (ConfigError, UnsupportedModelError) as error:
            # merging was asked for, or is all that can be done for a model without its scheduler
            if self.config.ratio is not None or self.state.clock.pipeline is None:
                raise
            self.unmerged = str(error)
        if self.config.where in ("block", "span"):
            join_runs(self.sites)

    def _take_a_step(self, arguments: Call) -> None:
        """Or make one more call of the same step, or begin a generation: the clock tells."""
        clock = self.state.clock
        generation = clock.generation
        clock.tick(arguments.get(self.time), arguments.get(self.parameters[0]))
        if clock.generation != generation or self.generation is None:
            self._begin_generation()
        elif clock.step:
            self.generation.look_at_first_step()
        self.state.schedule, self.state.turn = self.generation.schedule, self.generation.turn
        self.counts.why = self.generation.schedule.why

    def _begin_generation(self) -> None:
        if self.generation is not None:
            self.generation.end()
        clock = self.state.clock
        steps = None if torch.is_grad_enabled() else clock.steps()
        self.generation = Generation(self.config, self.model, clock.scheduler, steps, self._obstacle())
        self.state.begin_generation()
        self._warn_of_what_is_not_done()

    def _obstacle(self) -> str | None:
        """Why no step of this generation may be skipped."""
        if torch.is_grad_enabled():
            return "gradients are recorded"
        if self.model.training:
            return "the model is in training mode (model.eval() ends it)"
        recorder = records_attention(self.model)
        return f"{recorder} records attention in every step" if recorder else None

    def _conditions(self, arguments: Call) -> Call:
        """All that a call depends on but the noisy images and the time."""
        changing = (self.parameters[0], self.time, *TIMES)
        return {name: value for name, value in arguments.items() if name not in changing}

    def _warn_of_what_is_not_done(self) -> None:
        """Where settings come to nothing in the generation that begins."""
        schedule, config = self.generation.schedule, self.config
        if config.interval == "auto" and schedule.merged and self.unmerged:
            warn(f"nothing is done here: {schedule.why}, and tokens can't be merged: {self.unmerged}")
        elif schedule.skips and config.interval != "auto" and self.generation.sampling.noise:
            noise = self.generation.sampling.noise
            if self.generation.sampling.scheduler:
                warn(f"{noise}, which no forecast can know: use ratio=0.5 instead of interval, or neither")
        if torch.is_grad_enabled() and len(config.ranges()) > 1:
            raise ConfigError("a ratio by range of steps can't be honoured in training, which has no steps")
        ratios = list(zip(*(hook.place.ratios for hook in self.sites)))
        running = [step for step in range(schedule.steps or 0) if schedule.runs(step)]
        merged = (any(ratios[schedule.range(step)]) for step in running)
        if running and schedule.merged and any(map(any, ratios)) and not any(merged):
            warn(
                f"nothing is merged: all {schedule.steps} steps of this generation are dense with "
                f"ratio={config.ratio}; let a range with a ratio begin earlier"
            )

    def _prepare_sites(self, arguments: Call) -> None:
        """The ratio of each site in this call, and how the image is laid out."""
        state = self.state
        state.begin_call()
        state.dense = self.trial if self.trial is not None else not state.schedule.merged
        state.dense |= not self.sites or self.family.reads(arguments)
        for hook in self.sites:
            hook.run.clear()  # an exception may have ended the last call on the way
            hook.settle()
        if not state.dense or self.trial is not None:
            try:
                self._begin_merging(arguments)
            except ConfigError as error:
                if self.config.ratio is not None:  # merging was asked for
                    raise
                warn(f"nothing is done here: {state.schedule.why}, and tokens can't be merged: {error}")
                state.dense = True
        if state.dense and self.trial is None:
            for hook in self.sites:
                hook.leave_dense()
        state.times.start_call()

    def _begin_merging(self, arguments: Call) -> None:
        """See that nothing is in the way, and how many tokens each site gets."""
        state = self.state
        state.cut = self._cut(arguments)
        check_model(self.model, self.sites)
        state.layout.read(arguments)
        self._choose(arguments)
        for hook in self.sites:
            hook.foretell()
            check_attention(hook)

    def _cut(self, arguments: Call) -> bool:
        """What acts between blocks, or leaves some out, must find all tokens in their order."""
        return (
            self.family.skips
            or any(arguments.get(name) is not None for name in self.family.between_blocks)
            or act_between_blocks(self.model, self.sites)
        )

    def _choose(self, arguments: Call) -> None:
        """The ratio of each site in this call."""
        measured = self.config.auto and self.trial is None and not self.family.reads(arguments)
        off = autotune.decide(self, arguments).off if measured else frozenset()
        range_number = self.state.schedule.range(self.state.clock.step)
        for hook in self.sites:
            hook.choose(autotune.group_of(hook) in off, range_number)

    def _check_tokens_came_back(self) -> None:
        if self.state.dense:
            return
        if self.config.where == "kv" and not any(hook.calls for hook in self.sites):
            raise UnsupportedModelError(
                "no keys and values were merged: something replaced the attention of this model"
            )
        if any(hook.run.kept is not None for hook in self.sites):
            raise UnsupportedModelError(
                "a block was left out of its run, so that tokens came back merged or out of order: "
                'something else skips blocks of this model; use where="module" beside it'
            )


@dataclass
class ModelCall:
    """One call of the model: the outputs of those before it, and its own where that is forecast."""

    history: History | None = None
    skipped: bool = False
    output: Any = None


class Counts:
    """Steps and calls of the model, run and forecast."""

    def __init__(self) -> None:
        self.calls = {"run": 0, "forecast": 0}
        self.steps = {"run": 0, "forecast": 0}
        self.generations = 0
        self.why = ""  # the last generation ran the steps that it did

    def add(self, clock: Clock, skipped: bool) -> None:
        did = "forecast" if skipped else "run"
        self.calls[did] += 1
        self.steps[did] += clock.call == 0
        self.generations += clock.call == clock.step == 0


def warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def _compiled_frame(x: Tensor) -> Tensor:
    """A compiled model insists on finding something to compile in every call, also in one that is skipped."""
    return x + 1
