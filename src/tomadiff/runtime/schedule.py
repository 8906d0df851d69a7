"""Which steps of a generation are dense, and which ratio the others have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tomadiff.config import Config
from tomadiff.errors import ConfigError


@dataclass(frozen=True)
class Pace:
    """The steps of one generation; without a generation, all of them are merged."""

    remembers: bool = False  # sites do, from dense steps to merged ones
    first: int = 0  # so many are dense
    every: int = 0  # and every so many-th after these; 0 for none
    last: int | None = None  # and all from this one on
    starts: tuple[int, ...] = (0,)  # where ranges of steps begin, each with ratios of its own

    @classmethod
    def of(cls, config: Config, steps: int | None) -> Pace:
        """For a generation of so many steps, or of nobody knows how many."""
        remembers = config.remembers(steps)
        first, every = config.cadence(remembers)
        last = None
        if config.dense_last_steps:
            if steps is None:
                raise _unknown("dense_last_steps", config.dense_last_steps, "counts from the last step")
            last = steps - _steps("dense_last_steps", config.dense_last_steps, steps)
        starts = tuple(_steps("ratio", start, steps) for start, _ in config.ranges())
        return cls(remembers, _steps("dense_steps", first, steps), every, last, starts)

    def dense(self, step: int) -> bool:
        if step < self.first or (self.last is not None and step >= self.last):
            return True
        return bool(self.every and self._since_first(step) % self.every == 0)

    def turn(self, step: int) -> int:
        """Counts how often layouts changed so far: in every step, or between dense ones to be remembered."""
        return self._since_first(step) // self.every if self.remembers else step

    def range(self, step: int) -> int:
        """The number of the range that a step is in.

        What sites remember holds for one plan, from a dense step to the next: so there, a range that begins
        between two dense steps waits for the second.
        """
        if self.remembers and len(self.starts) > 1:
            while not self.dense(step):
                step -= 1
        return sum(start <= step for start in self.starts) - 1

    def _since_first(self, step: int) -> int:
        """Steps since the last of the first dense ones."""
        return step - max(self.first - 1, 0)


def _steps(name: str, value: int | float, steps: int | None) -> int:
    """A number of steps, also from a share of all."""
    if not isinstance(value, float) or value == 0:
        return int(value)
    if steps is None:
        raise _unknown(name, value, "is a share of the steps")
    return round(value * steps)


def _unknown(name: str, value: Any, why: str) -> ConfigError:
    return ConfigError(
        f"{name}: {value} {why}, and a model alone doesn't know how many there are: give tomadiff.apply the "
        "pipeline, or a number of steps from the first one"
    )
