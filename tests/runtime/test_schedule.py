"""Which steps run: the first, the last, and every so many between them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tomadiff.config import Config
from tomadiff.runtime.sampling import Sampling
from tomadiff.runtime.schedule import FROM_MIDWAY, FROM_NOISE, Schedule, make_schedule


def running(steps: int, interval: int, warm_up: int = FROM_NOISE) -> list[int]:
    schedule = Schedule(steps, interval, warm_up=warm_up)
    return [step for step in range(steps) if schedule.runs(step)]


@pytest.mark.parametrize(
    ("steps", "interval", "expected"),
    [
        (10, 3, [0, 3, 6, 8, 9]),
        (24, 2, [*range(0, 24, 2), 23]),
        (25, 2, [*range(0, 23, 2), 23, 24]),
        (24, 3, [0, 3, 6, 9, 12, 15, 18, 20, 22, 23]),
        (50, 3, [*range(0, 50, 3), 49]),
        (24, 4, [0, 4, 8, 12, 16, 19, 22, 23]),
        (6, 1, [0, 1, 2, 3, 4, 5]),
        (1, 4, [0]),
        (2, 4, [0, 1]),
    ],
)
def test_gaps_are_even_up_to_the_last_two_steps_and_shorter_ones_come_last(
    steps: int, interval: int, expected: list[int]
) -> None:
    assert running(steps, interval) == expected


@given(st.integers(3, 300), st.integers(2, 40))
def test_the_first_and_the_last_two_steps_run_and_no_gap_is_wider_than_the_interval(
    steps: int, interval: int
) -> None:
    ran = running(steps, interval)
    gaps = [after - before for before, after in pairwise(ran)]
    assert ran[0] == 0 and ran[-2:] == [steps - 2, steps - 1]
    assert max(gaps) <= interval and gaps == sorted(gaps, reverse=True)
    assert max(gaps) - min(gaps[:-1]) <= 1, "even"
    assert len(ran) == len({0, 1, *range(1, steps, interval), steps - 1}), "as if counted from the second on"
    assert running(steps, interval, FROM_MIDWAY) == sorted({1, *ran})


def test_nobody_knows_the_last_step_of_a_bare_model() -> None:
    schedule = Schedule(interval=3)
    assert [step for step in range(12) if schedule.runs(step)] == [0, 1, 4, 7, 10]


def test_steps_beyond_the_last_run() -> None:
    """A pipeline may call its model once more than its scheduler says."""
    schedule = Schedule(10, 3)
    assert schedule.runs(10) and schedule.runs(11)


@pytest.mark.parametrize(
    ("steps", "noise", "between_steps", "image_is_known", "interval"),
    [
        (5, None, False, True, 1),
        (6, None, False, True, 2),
        (6, "noise", False, True, 2),
        (39, None, False, True, 2),
        (40, "noise", False, True, 3),
        (50, "noise", False, False, 1),
        (11, None, False, False, 1),
        (12, None, False, False, 2),
        (24, None, True, True, 1),
        (None, None, False, True, 1),
    ],
)
def test_auto_goes_by_steps_noise_and_what_is_known_of_the_output(
    steps: int | None, noise: str | None, between_steps: bool, image_is_known: bool, interval: int
) -> None:
    sampling = Sampling("Some", noise, between_steps, known=True)
    config = Config().resolve()
    schedule = make_schedule(config, steps, 0, sampling, None, image_is_known=image_is_known)
    assert schedule.interval == interval and schedule.merges == (interval == 1)
    dense = make_schedule(config, steps, 0, sampling, "gradients are recorded", image_is_known=image_is_known)
    assert dense.interval == 1 and "gradients" in dense.why
