"""Which steps of a generation run, and at which ratio."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tomadiff.config import Ratio, ResolvedConfig
from tomadiff.errors import ConfigError

from .sampling import Sampling

# The first steps always run. From pure noise one is enough: the next output is nearly the same. A generation
# that begins midway (image to image, a refiner), or perhaps does (a bare model), needs two outputs.
FROM_NOISE, FROM_MIDWAY = 1, 2
# for interval="auto": (least number of steps, interval)
INTERVALS = ((6, 2), (40, 3))
PLAIN_INTERVALS = ((12, 2), (40, 3))  # where outputs can't be turned into clean images


@dataclass(frozen=True)
class RatioSchedule:
    """The ratio of every site in every step."""

    # for each range of steps: its first step, and its ratio; the first range starts at 0
    ranges: tuple[tuple[int, Ratio], ...] = ((0, 0.0),)

    def range(self, step: int) -> int:
        """The number of the range that a step is in."""
        return sum(start <= step for start, _ in self.ranges) - 1

    def at(self, step: int, kind: str, level: int) -> float:
        """The ratio at one step, for sites of this kind at this level of the model."""
        ratio = self.ranges[self.range(step)][1]
        return ratio.get(kind, ratio.get(level, 0.0)) if isinstance(ratio, Mapping) else ratio

    @property
    def ends_dense(self) -> bool:
        return self.ranges[-1][1] == 0

    def ever(self, kind: str, level: int) -> bool:
        """Whether such sites merge in any step."""
        return any(self.at(start, kind, level) for start, _ in self.ranges)


@dataclass(frozen=True)
class Schedule:
    """The steps of one generation."""

    steps: int | None = None  # how many there are, if known
    interval: int = 1
    listed: frozenset[int] | None = None  # the steps that run, if the user listed them
    warm_up: int = FROM_MIDWAY  # number of first steps that run
    merges: bool = True  # tokens are merged in the steps that run
    ratios: RatioSchedule = RatioSchedule()
    why: str = ""  # the reason for this interval

    def runs(self, step: int) -> bool:
        """Whether the model runs; if not, its output is forecast."""
        if self.listed is not None:
            return step in self.listed
        if step < self.warm_up:
            return True
        if self.steps is None:
            return (step - FROM_MIDWAY + 1) % self.interval == 0
        return step >= self.steps - 1 or step in self._even_steps

    @functools.cached_property
    def _even_steps(self) -> frozenset[int]:
        """Steps at even distances, from the first to the second last.

        Where the interval leaves a remainder, the last gaps are shorter by one: errors of the last steps stay
        in the picture, those of early ones are mended.
        """
        length = max((self.steps or 0) - 2, 0)
        gaps = max(-(-length // self.interval), 1)
        shorter, longer = length // gaps, length % gaps  # the length of short gaps, the number of long ones
        return frozenset(shorter * number + min(number, longer) for number in range(gaps + 1))

    @property
    def skips(self) -> bool:
        return self.interval > 1 or self.listed is not None


def make_schedule(
    config: ResolvedConfig,
    steps: int | None,
    first: int,
    sampling: Sampling,
    obstacle: str | None,
    image_is_known: bool,
) -> Schedule:
    """The schedule of a generation with this many steps; None if their number is unknown.

    first: the entry of the scheduler's table that is step 0. obstacle: why no step may be skipped, whatever
    the settings say. image_is_known: the model's output can be turned into the clean image that it expects.
    """
    interval, why = _interval(config, steps, sampling, obstacle, image_is_known)
    warm_up = FROM_NOISE if steps is not None and not first else FROM_MIDWAY
    listed = None
    if isinstance(interval, tuple):
        if steps is not None and interval[-1] != steps - 1:
            raise ConfigError(
                f"interval={list(interval)} ends with step {interval[-1]}, and this generation with step "
                f"{steps - 1}, which should run: list the steps for {steps}, or give a number"
            )
        listed = frozenset(interval)
        interval = 1
    ranges = tuple((_start(start, steps), ratio) for start, ratio in config.ranges())
    if config.merges_as_fallback and steps is not None and steps > 1:
        # nobody asked to merge in every step, and what late steps get wrong stays in the picture
        ranges = (*ranges, (math.ceil(steps / 2), 0.0))
    ratios = RatioSchedule(ranges)
    merges = not config.merges_as_fallback or (interval == 1 and listed is None)
    return Schedule(steps, interval, listed, warm_up, merges, ratios, why)


def _interval(
    config: ResolvedConfig,
    steps: int | None,
    sampling: Sampling,
    obstacle: str | None,
    image_is_known: bool,
) -> tuple[int | tuple[int, ...], str]:
    if config.interval == 1:
        return 1, ""
    if obstacle:
        return 1, f"every step runs, since {obstacle}"
    if isinstance(config.interval, (int, tuple)):
        return config.interval, "as asked"
    if sampling.noise and not image_is_known:
        return 1, f"every step runs, since {sampling.noise}"
    if steps is None:
        return 1, "every step runs, since nobody tells how many there are"
    if sampling.between_steps:
        return 1, f"every step runs, since {sampling.scheduler} calls the model more than once a step"
    intervals = INTERVALS if image_is_known else PLAIN_INTERVALS
    interval = max((every for least, every in intervals if steps >= least), default=1)
    if interval == 1:
        return 1, f"every step runs, since {steps} steps are too few to forecast between"
    if sampling.noise:
        return interval, f"{sampling.noise}, and the image that the model expects is held in between"
    return interval, f"{sampling.scheduler} is deterministic"


def _start(value: int | float, steps: int | None) -> int:
    """The first step of a range, given as a step or as a share of all steps."""
    if not isinstance(value, float) or value == 0:
        return int(value)
    if steps is None:
        raise _unknown("ratio", value)
    return round(value * steps)


def _unknown(name: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{name}: {value} is a share of the steps, and a model alone doesn't know how many there are: give "
        "tomadiff.apply the pipeline, or a number of steps from the first one"
    )
