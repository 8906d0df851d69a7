"""Nothing goes from one generation to the next, whatever became of the one before: for every tiny model.

The same generations in every run of the tests; `make fuzz` tries many others.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tomadiff
from tomadiff.errors import ConfigError

TIMES = (0.9, 0.7, 0.5, 0.3)
# plans and outputs that are kept for long, so that what is left of another generation would be used
SETTINGS: list[dict[str, Any]] = [
    {"ratio": 0.5, "refresh_destinations": 9, "refresh_weights": 9},
    {"ratio": 0.5, "refresh_destinations": 9, "refresh_weights": 9, "share": "kind", "interval": 2},
    {"ratio": 0.5, "method": "tome", "refresh_destinations": 9, "refresh_weights": 9},
    {"interval": 2},
    {"interval": 3, "ratio": 0.5},
]


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_generation_is_the_same_after_any_other_that_was_cancelled_or_had_one_step(name: str) -> None:
    """The model is bare: nobody tells it that a generation begins, but that time goes back, or the image."""
    case = tiny.tiny(name)
    model = tiny.build(case)
    *frames, height, width = tiny.grid_of(case)
    halves = (*frames, height // 2, width // 2)

    def generation(seeds: tuple[int, ...], grid: tuple[int, ...] | None, steps: int) -> list[Tensor]:
        return [tiny.run(model, case, seeds, grid, time) for time in TIMES[:steps]]

    try:
        generation((0,), halves, 1)
    except RuntimeError:  # it takes pictures of one size
        halves = None

    @fuzz(name, share=100)
    @given(
        st.sampled_from(SETTINGS),
        st.lists(st.tuples(st.sampled_from([(0,), (1,), (0, 1)]), st.integers(1, 3)), min_size=1, max_size=2),
        st.sampled_from([None, halves]),
    )
    def compare(
        chosen: dict[str, Any], before: list[tuple[tuple[int, ...], int]], grid: tuple[int, ...] | None
    ) -> None:
        try:
            tomadiff.apply(model, **chosen)
        except ConfigError:
            return
        expected = generation((2,), None, 4)
        tomadiff.apply(model, **chosen)
        for seeds, steps in before:
            generation(seeds, grid, steps)
        assert all(map(torch.equal, generation((2,), None, 4), expected))

    compare()
