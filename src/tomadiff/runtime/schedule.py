"""Which steps of a generation run, and at which ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from tomadiff.config import Ratio, ResolvedConfig
from tomadiff.errors import ConfigError

from .sampling import FIRST_ORDER, MULTISTEP, TWO_CALLS, Sampling

WARM_UP = 2  # number of first steps that always run: a forecast needs two outputs
MANY = 11  # steps that run: a wider gap between fewer of them does more harm than the last two do good
# for interval="auto": (least number of steps, interval)
FIRST_ORDER_INTERVALS = ((8, 2), (40, 3))
MULTISTEP_INTERVALS = ((20, 2), (40, 3))  # multistep solvers extrapolate themselves, so forecasts gain less


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

    def ever(self, kind: str, level: int) -> bool:
        """Whether such sites merge in any step."""
        return any(self.at(start, kind, level) for start, _ in self.ranges)


@dataclass(frozen=True)
class Schedule:
    """The steps of one generation."""

    steps: int | None = None  # how many there are, if known
    interval: int = 1
    running: frozenset[int] | None = None  # the steps that run; None if nobody knows how many there are
    merges: bool = True  # tokens are merged in the steps that run
    ratios: RatioSchedule = RatioSchedule()
    why: str = ""  # the reason for this interval

    def runs(self, step: int) -> bool:
        """Whether the model runs; if not, its output is forecast."""
        if self.running is not None:
            return step in self.running or (self.steps is not None and step >= self.steps)
        return step < WARM_UP or (step - WARM_UP + 1) % self.interval == 0

    @property
    def skips(self) -> bool:
        return self.interval > 1 or self.running is not None


def running_steps(steps: int, interval: int, solver: str = FIRST_ORDER) -> list[int]:
    """The steps that run: the first two, every `interval`-th after them, and the last.

    Errors of early steps are mended by those that follow, errors of the last stay in the picture. So if the
    gap before the last step would be a whole one, the last two run. A multistep solver, which extrapolates
    itself, has even gaps.
    """
    even = even_steps(steps, interval)
    whole = even[-2:] == [steps - 1 - interval, steps - 1]
    return even if solver == MULTISTEP or len(even) < MANY or not whole else ending_in_two(even)


def even_steps(steps: int, interval: int) -> list[int]:
    """The first two steps, every `interval`-th after them, and the last."""
    return sorted({*range(min(WARM_UP, steps)), *range(WARM_UP - 1, steps, interval), steps - 1})


def ending_in_two(steps: list[int]) -> list[int]:
    """As many steps, with the last two among them: in return, gaps in the middle are wider by a step."""
    start = steps[: WARM_UP - 1]
    gaps = [after - before for before, after in pairwise(steps[len(start) :])]
    spare, gaps[-1] = gaps[-1] - 1, 1
    middle = (len(gaps) - spare) // 2
    for place in range(middle, middle + spare):
        gaps[place % (len(gaps) - 1)] += 1
    return [*start, *accumulate(gaps, initial=steps[len(start)])]


def make_schedule(
    config: ResolvedConfig, steps: int | None, sampling: Sampling, obstacle: str | None
) -> Schedule:
    """The schedule of a generation with this many steps; None if their number is unknown.

    obstacle: why no step may be skipped, whatever the settings say.
    """
    interval, why = _interval(config, steps, sampling, obstacle)
    running = None
    if isinstance(interval, tuple):
        if steps is not None and interval[-1] != steps - 1:
            raise ConfigError(
                f"interval={list(interval)} ends with step {interval[-1]}, and this generation with step "
                f"{steps - 1}, which should run: list the steps for {steps}, or give a number"
            )
        running, interval = frozenset(interval), 1
    elif interval > 1 and steps is not None:
        running = frozenset(running_steps(steps, interval, sampling.solver))
    ratios = RatioSchedule(tuple((_start(start, steps), ratio) for start, ratio in config.ranges()))
    merges = not config.merges_as_fallback or running is None
    return Schedule(steps, interval, running, merges, ratios, why)


def _interval(
    config: ResolvedConfig, steps: int | None, sampling: Sampling, obstacle: str | None
) -> tuple[int | tuple[int, ...], str]:
    if config.interval == 1:
        return 1, ""
    if obstacle:
        return 1, f"every step runs, since {obstacle}"
    if isinstance(config.interval, (int, tuple)):
        return config.interval, "as asked"
    if sampling.noise:
        return 1, f"every step runs, since {sampling.noise}"
    if steps is None:
        return 1, "every step runs, since nobody tells how many there are"
    if sampling.solver == TWO_CALLS:
        return 1, f"every step runs, since {sampling.scheduler} calls the model more than once a step"
    rule = MULTISTEP_INTERVALS if sampling.solver == MULTISTEP else FIRST_ORDER_INTERVALS
    interval = max((every for least, every in rule if steps >= least), default=1)
    if interval == 1:
        return 1, f"every step runs, since {steps} steps are too few to forecast between"
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
