"""What the sites of a model share: the settings, the time, and what is known of the call under way."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tomadiff.config import Config
from tomadiff.core import Schedule
from tomadiff.methods import FROM_BLOCK_INPUT
from tomadiff.models import PerTokenArg

from .clock import Clock
from .layout import Layout
from .plan_cache import Plans
from .schedule import Schedule as StepSchedule
from .timing import Times


class State:
    """The patch sets it before each call of the model; sites go by it, and keep their plans here."""

    def __init__(self, config: Config, clock: Clock, layout: Layout) -> None:
        self.config, self.clock, self.layout = config, clock, layout
        self.from_input = config.method in FROM_BLOCK_INPUT  # are plans made
        self.times = Times()
        # of this generation
        self.schedule = StepSchedule()
        self.turn = 0  # counts the steps that run
        self.plans = Plans(Schedule(config.refresh_destinations, config.refresh_weights))
        self.lengths: dict[tuple[Any, ...], tuple[int, int]] = {}  # of sequences, foretold
        # of this call
        self.called = False  # one is under way
        self.dense = False  # everywhere
        self.cut = False  # every block is a run of its own
        self.block_input: Tensor | None = None  # of the block under way, where modules in it need that
        # arguments and what they are for merged tokens
        self.followed: dict[tuple[int, int, PerTokenArg], tuple[Any, Any]] = {}

    def shifted(self) -> bool:
        """Whether regions are shifted in this step."""
        return self.config.shift and self.turn % 2 == 1

    def begin_generation(self) -> None:
        self.plans.clear()
        self.lengths.clear()

    def begin_call(self) -> None:
        self.end_call()
        self.called = True

    def end_call(self) -> None:
        self.called = False
        self.followed.clear()
        self.block_input = None

    def forget(self) -> None:
        """Let go of all tensors; whatever comes next is a new generation."""
        self.clock.forget()
        self.layout.forget()
        self.plans.clear()
        self.end_call()
