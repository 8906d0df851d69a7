"""Which steps run: the first two, the last, and as many between them as the interval says."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tomadiff.runtime.sampling import FIRST_ORDER, MULTISTEP
from tomadiff.runtime.schedule import Schedule, running_steps


@given(st.integers(1, 300), st.integers(2, 40), st.sampled_from([FIRST_ORDER, MULTISTEP]))
def test_as_many_steps_run_as_at_even_gaps_and_the_ends_are_among_them(
    steps: int, interval: int, solver: str
) -> None:
    running = running_steps(steps, interval, solver)
    even = {*range(min(2, steps)), *range(1, steps, interval), steps - 1}
    assert running == sorted(set(running)) and len(running) == len(even)
    assert {*range(min(2, steps)), steps - 1} <= set(running)
    widest = max((after - before for before, after in pairwise(running)), default=1)
    assert widest <= interval + 1 or len(running) < interval


@pytest.mark.parametrize(
    ("steps", "interval", "running"),
    [
        (10, 3, [0, 1, 4, 7, 9]),
        (16, 2, [0, 1, 3, 5, 7, 9, 11, 13, 15]),  # too few for wider gaps
        (20, 2, [0, 1, 3, 5, 7, 9, 12, 14, 16, 18, 19]),
        (24, 2, [0, 1, 3, 5, 7, 9, 11, 14, 16, 18, 20, 22, 23]),
        (28, 3, [0, 1, 4, 7, 10, 13, 16, 19, 22, 25, 27]),  # the last gap is short as it is
        (50, 3, [0, 1, 4, 7, 10, 13, 16, 19, 22, 26, 30, 33, 36, 39, 42, 45, 48, 49]),
    ],
)
def test_the_last_two_run_where_many_do(steps: int, interval: int, running: list[int]) -> None:
    assert running_steps(steps, interval) == running


def test_multistep_solvers_have_even_gaps() -> None:
    assert running_steps(24, 2, MULTISTEP) == [0, *range(1, 24, 2)]


def test_nobody_knows_the_last_step_of_a_bare_model() -> None:
    schedule = Schedule(interval=3)
    assert [step for step in range(12) if schedule.runs(step)] == [0, 1, 4, 7, 10]


def test_steps_beyond_the_last_run() -> None:
    """A pipeline may call its model once more than its scheduler says."""
    schedule = Schedule(10, 3, frozenset(running_steps(10, 3)))
    assert schedule.runs(10) and schedule.runs(11)
