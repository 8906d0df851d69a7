"""Nothing goes from one generation to the next, whatever became of the one before: for every tiny model.

The same generations in every run of the tests; `make fuzz` tries many others.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import tiny
import torch
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from pipelines import denoiser, draw, make
from torch import Tensor

import tomadiff
from tomadiff.errors import ConfigError
from tomadiff.runtime.hook import parameter_names

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


@pytest.fixture(params=["flux", "sdxl"])
def generate(request: pytest.FixtureRequest) -> Callable[..., list[Tensor]]:
    """Generations of one model, whose arguments but for the timestep are the same tensors in every step."""
    case = tiny.tiny(request.param)
    model = tiny.build(case)

    @torch.no_grad()
    def generate(
        settings: dict[str, Any] | None, noise: tuple[int, ...], text: tuple[int, ...], times: Sequence[float]
    ) -> list[Tensor]:
        if settings:
            tomadiff.apply(model, **settings)
        sample = parameter_names(model)[0]
        calls = [case.call(model, tiny.grid_of(case), text, time) for time in times]
        same = calls[0] | {sample: case.call(model, tiny.grid_of(case), noise, times[0])[sample]}
        called = [model(**same | {"timestep": call["timestep"]}, return_dict=False)[0] for call in calls]
        return called

    return generate


def test_another_text_for_the_noise_of_a_cancelled_generation_makes_its_own_plans(
    generate: Callable[..., list[Tensor]],
) -> None:
    """Its first call looks like a second one of the same step, by another text, as guidance makes it."""
    kept = {"ratio": 0.5, "refresh_destinations": 9, "refresh_weights": 9}
    (anew,) = generate(kept, (0,), (1,), TIMES[1:2])
    generate(kept, (0,), (0,), TIMES[:1])
    assert torch.equal(generate(None, (0,), (1,), TIMES)[1], anew)


def test_another_text_for_the_noise_of_a_cancelled_generation_has_its_own_forecasts(
    generate: Callable[..., list[Tensor]],
) -> None:
    every = generate({"interval": 1, "ratio": 0}, (0,), (1,), TIMES)
    generate({"interval": 2}, (0,), (0,), TIMES[:1])
    assert all(map(torch.equal, generate(None, (0,), (1,), TIMES)[:3], every)), (
        "until two outputs are its own"
    )


def test_a_batch_whose_first_sample_was_in_a_cancelled_generation_is_a_new_one(
    generate: Callable[..., list[Tensor]],
) -> None:
    for settings in SETTINGS:
        expected = generate(settings, (0, 2), (0, 1), TIMES)
        generate(settings, (0, 1), (0, 1), TIMES[:1])
        assert all(map(torch.equal, generate(None, (0, 2), (0, 1), TIMES), expected)), settings


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Without Python's collector of cycles, which comes when it likes, or never on a GPU that is full."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", ["sdxl", "flux"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"ratio": 0.5}, {"ratio": 0.5, "where": "module"}, {"ratio": 0.5, "where": "kv"}],
    ids=str,
)
def test_a_pipeline_that_tomadiff_was_on_gives_its_memory_back_at_once(
    name: str, settings: dict[str, Any], uncollected: None
) -> None:
    """`del pipe; torch.cuda.empty_cache()` must make room for the next one, as without tomadiff."""
    pipe = make(name)
    tomadiff.apply(pipe, **settings)
    draw(pipe, steps=2)
    with tomadiff.merged(pipe, ratio=0.25):
        draw(pipe, steps=2)
    draw(pipe, steps=8)
    tomadiff.remove(pipe)
    model = weakref.ref(denoiser(pipe))
    vars(model()).pop("_diffusers_hook", None)  # that of diffusers' own cache_context, which is a cycle
    del pipe
    assert model() is None
