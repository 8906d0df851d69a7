"""Without settings, tokens are merged only in models that tolerate it; a ratio that is given is honoured."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FirstBlockCacheConfig
from pipelines import denoiser, draw, make, shallow

import tomadiff
from tomadiff.runtime import tolerance
from tomadiff.tools.demo.embedded import load_embedded
from tomadiff.tools.samplers import scheduler_by_name

STEPS = 3  # too few for forecasts


@pytest.fixture(params=["sdxl", "flux"])
def pipe(request: pytest.FixtureRequest) -> DiffusionPipeline:
    return make(request.param)


def accept_errors_up_to(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tolerance, "LIMIT", limit)
    monkeypatch.setattr(tolerance, "LIMIT_OF_FIRST_HALF", limit)


@pytest.fixture
def tolerant(monkeypatch: pytest.MonkeyPatch) -> None:
    accept_errors_up_to(float("inf"), monkeypatch)


@pytest.fixture
def intolerant(monkeypatch: pytest.MonkeyPatch) -> None:
    accept_errors_up_to(0.0, monkeypatch)


def calls_in(pipe: DiffusionPipeline, **call: Any) -> int:
    """How often the model runs for a picture."""
    calls: list[None] = []
    handle = denoiser(pipe).register_forward_hook(lambda *_: calls.append(None))
    draw(pipe, steps=STEPS, **call)
    handle.remove()
    return len(calls)


def test_a_model_that_tolerates_it_is_merged_in_the_first_half_of_the_steps_from_its_first_picture_on(
    pipe: DiffusionPipeline, tolerant: None
) -> None:
    asked = draw(tomadiff.apply(pipe, ratio=[(0, 0.5), (2, 0)]), steps=STEPS)
    tomadiff.apply(pipe)
    assert torch.equal(draw(pipe, steps=STEPS), asked) and torch.equal(draw(pipe, steps=STEPS), asked)
    assert "which is accepted" in str(tomadiff.report(pipe))


def test_a_model_that_does_not_is_left_as_it_is_and_says_so(
    pipe: DiffusionPipeline, intolerant: None
) -> None:
    dense = draw(pipe, steps=STEPS)
    tomadiff.apply(pipe)
    with pytest.warns(UserWarning, match=r"changed the model's output by \d+%.*fewer steps.*give a ratio"):
        assert torch.equal(draw(pipe, steps=STEPS), dense)
    assert torch.equal(draw(pipe, steps=STEPS), dense)
    report = tomadiff.report(pipe)
    assert "is not accepted" in str(report) and report.held == 0
    assert all(site.dense_calls == site.calls for site in report.sites)


def test_a_ratio_that_is_given_is_honoured_without_asking_the_model(
    pipe: DiffusionPipeline, intolerant: None
) -> None:
    dense, calls = draw(pipe, steps=STEPS), calls_in(pipe)
    tomadiff.apply(pipe, ratio=0.5)
    assert calls_in(pipe) == calls
    assert not torch.equal(draw(pipe, steps=STEPS), dense)


@pytest.mark.parametrize("limit", [0.0, float("inf")])
@pytest.mark.filterwarnings("ignore:nothing is done here")
def test_the_model_runs_once_more_in_the_first_picture_of_each_size(
    pipe: DiffusionPipeline, monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    accept_errors_up_to(limit, monkeypatch)
    calls = calls_in(pipe)
    tomadiff.apply(pipe)
    sizes = [(64, 64), (64, 64), (64, 128), (64, 64), (64, 128)]
    assert [calls_in(pipe, size=size) - calls for size in sizes] == [1, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("steps", "merged"), [(1, {"emoji-unet"}), (2, {"emoji-unet", "emoji-flux"})], ids=["all", "first half"]
)
def test_the_embedded_flux_is_merged_only_if_dense_steps_follow(steps: int, merged: set[str]) -> None:
    found = set()
    for name, sampler in (("emoji-unet", "euler-a"), ("emoji-flux", "stochastic")):
        pipe = load_embedded(name)
        pipe.set_progress_bar_config(disable=True)
        pipe.scheduler = scheduler_by_name(sampler, pipe.scheduler)
        tomadiff.apply(pipe)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that nothing is done with the Flux
            generator = torch.Generator().manual_seed(0)
            pipe("a cat", num_inference_steps=steps, generator=generator, output_type="pt")
        if any(site.calls > site.dense_calls for site in tomadiff.report(pipe).sites):
            found.add(name)
    assert found == merged


def test_beside_a_cache_nothing_is_tried_since_it_would_count_the_call_as_a_step() -> None:
    pipe = make("flux")
    calls = calls_in(pipe)
    tomadiff.apply(pipe)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    assert calls_in(pipe) == calls


@pytest.mark.parametrize("how", ["compile", "torch.compile", "compile_repeated_blocks"])
def test_a_compiled_model_is_not_tried_since_it_would_be_compiled_twice(how: str) -> None:
    pipe = shallow("flux")
    calls = calls_in(pipe)
    tomadiff.apply(pipe)
    if how == "torch.compile":
        pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    else:
        getattr(pipe.transformer, how)(backend="eager")
    assert calls_in(pipe) == calls
    assert "in its first call" not in str(tomadiff.report(pipe))


def test_the_error_is_the_deviation_over_that_of_the_dense_output() -> None:
    reference = torch.randn(2, 5) + 7
    wrong = reference + 0.1 * torch.randn(2, 5)
    expected = (wrong - reference).square().mean().sqrt() / reference.var(correction=0).sqrt()
    assert tolerance.relative_error((wrong,), [reference]) == pytest.approx(expected.item(), rel=1e-5)
    assert tolerance.relative_error(reference.half(), reference.half()) == 0
