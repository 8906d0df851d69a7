"""Merging on one model: its sites, and what happens before and after each call of it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tomadiff.config import Config
from tomadiff.errors import ConfigError, UnsupportedModelError
from tomadiff.models import Call, Family

from . import autotune
from .call_guard import Door
from .clock import Clock
from .conflicts import act_between_blocks, check_attention, check_model
from .hook import SiteHook, join_runs, parameter_names
from .layout import Layout
from .schedule import Pace
from .sites import find
from .state import State


class Patch:
    """Sites that share a state. It is not on the model yet: `attachment` puts it there."""

    def __init__(self, model: nn.Module, family: Family, config: Config, pipeline: Any = None) -> None:
        self.model, self.family, self.config = model, family, config
        self.parameters = parameter_names(model)
        self.state = State(config, Clock(pipeline, family.ascending), Layout(model, family))
        self.sites = [SiteHook(self.state, place) for place in find(model, family, config)]
        if config.where in ("block", "span"):
            join_runs(self.sites)
        self.made_for: str | None = None  # the class of models that its settings file is about, if not this
        self.door = Door()
        self.trial: bool | None = None  # while auto measures, whether this call is dense; it is no step
        self.answers: dict[autotune.Situation, autotune.Answer] = {}  # what auto found
        self.model_calls = 0
        self.handles: list[RemovableHandle] = []  # of hooks beside those of sites

    @torch.compiler.disable
    def before_model(self, model: nn.Module, args: tuple, kwargs: Call) -> None:
        """See where in a generation this call is, and how the image is laid out."""
        state, call = self.state, dict(zip(self.parameters, args)) | kwargs
        if self.trial is None:
            self._take_a_step(call)
        state.begin_call()
        for hook in self.sites:
            hook.run.clear()  # an exception may have ended the last call on the way
            hook.settle()
        state.dense = state.pace.dense(state.clock.step) if self.trial is None else self.trial
        state.dense |= self.family.reads(call)
        state.cut = self._cut(call)
        check_model(self.model, self.sites)
        state.layout.read(call)
        self._choose(call)
        for hook in self.sites:
            hook.foretell()
            check_attention(hook)
        state.times.start_call()

    @torch.compiler.disable
    def after_model(self, model: nn.Module, args: tuple, output: Any) -> None:
        """See that all tokens came back."""
        if not self.door.inside():
            return
        self.state.end_call()
        if self.trial is None:
            self.door.leave()
        if output is None:  # an exception ended the call on the way: nobody goes on from here
            self.forget()
            return
        self.state.times.end_call()
        for hook in self.sites:
            if hook.ran:
                hook.count()
        if self.config.where == "kv" and not any(hook.calls for hook in self.sites):
            raise UnsupportedModelError(
                "no keys and values were merged: something replaced the attention of this model"
            )
        if any(hook.run.kept is not None for hook in self.sites):
            raise UnsupportedModelError(
                "a block was left out of its run, so that tokens came back merged or out of order: "
                'something else skips blocks of this model; use where="module" beside it'
            )

    def forget(self) -> None:
        """Let go of all tensors; whatever comes next is a new generation."""
        self.state.forget()
        for hook in self.sites:
            hook.memories.clear()
            hook.run.clear()

    def __reduce__(self) -> Any:
        raise TypeError("a model with merging on it can't be pickled: call tomadiff.remove first")

    def _take_a_step(self, call: Call) -> None:
        """Or make one more call of the same step, or begin a generation: the clock tells."""
        if not self.door.enter():
            self.forget()
        self.model_calls += 1
        clock = self.state.clock
        generation = clock.generation
        clock.tick(call.get(self.family.time), call.get(self.parameters[0]))
        if clock.generation != generation:
            self.state.begin_generation()
            for hook in self.sites:
                hook.memories.clear()
            self.state.pace = self._pace()

    def _pace(self) -> Pace:
        """Which steps of the generation that begins are dense."""
        if torch.is_grad_enabled():  # training has no steps
            if len(self.config.ranges()) > 1:
                raise ConfigError(
                    "a ratio by range of steps can't be honoured in training, which has no steps"
                )
            return Pace()
        steps = self.state.clock.steps()
        pace = Pace.of(self.config, steps)
        ratios = list(zip(*(hook.place.ratios for hook in self.sites)))
        merged = (any(ratios[pace.range(step)]) for step in range(steps or 0) if not pace.dense(step))
        if steps and any(map(any, ratios)) and not any(merged):
            warnings.warn(
                f"nothing is merged: all {steps} steps of this generation are dense, with "
                f"dense_steps={pace.first}, dense_every={pace.every}, "
                f"dense_last_steps={self.config.dense_last_steps} and ratio={self.config.ratio}; "
                "give fewer dense ones",
                stacklevel=2,
            )
        return pace

    def _cut(self, call: Call) -> bool:
        """What acts between blocks, or leaves some out, must find all tokens in their order."""
        return (
            self.family.skips
            or any(call.get(name) is not None for name in self.family.between_blocks)
            or act_between_blocks(self.model, self.sites)
        )

    def _choose(self, call: Call) -> None:
        """The ratio of each site in this call."""
        measured = self.config.auto and self.trial is None and not self.family.reads(call)
        off = autotune.decide(self, call).off if measured else frozenset()
        range_number = self.state.pace.range(self.state.clock.step)
        for hook in self.sites:
            hook.choose(autotune.group_of(hook) in off, range_number)
