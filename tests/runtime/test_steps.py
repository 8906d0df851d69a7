"""Steps are counted as pipelines take them: some leave out the first, or the last, or make many calls."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from comparison import mostly_alike
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    SchedulerMixin,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPanoramaPipeline,
    StableDiffusionPipeline,
)
from pipelines import draw, make, steps_that_run, text
from tiny import build, tiny
from tiny import draw as draw_case

import tomadiff

PROMPT = {"prompt_embeds": text(0)[0], "negative_prompt_embeds": text(1)[0], "output_type": "latent"}


def remade(pipe: Any, kind: type) -> Any:
    """Another pipeline of the same parts."""
    other = kind(**pipe.components, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    return other


def calls(pipe: Any) -> tuple[int, int]:
    """Of each site, and of these, dense ones."""
    (counts,) = {(site.calls, site.dense_calls) for site in tomadiff.report(pipe).sites}
    return counts


@pytest.mark.parametrize(
    "scheduler", [EulerDiscreteScheduler(), DDIMScheduler()], ids=lambda s: type(s).__name__
)
def test_the_last_steps_stay_dense_where_the_first_are_left_out(scheduler: SchedulerMixin) -> None:
    """Not every scheduler says so itself."""
    pipe = remade(make("sd1"), StableDiffusionImg2ImgPipeline)
    pipe.scheduler = scheduler
    tomadiff.apply(pipe, ratio=[(0, 0.5), (0.6, 0)])
    pipe(image=torch.zeros(1, 4, 16, 16), strength=0.5, num_inference_steps=10, **PROMPT)
    assert calls(pipe) == (5, 2)


@pytest.mark.parametrize(
    "scheduler", [EulerDiscreteScheduler(), DDIMScheduler()], ids=lambda s: type(s).__name__
)
def test_a_generation_that_begins_midway_runs_its_first_two_steps(scheduler: SchedulerMixin) -> None:
    """Only from pure noise is the second output nearly the first."""
    pipe = remade(make("sd1"), StableDiffusionImg2ImgPipeline)
    pipe.scheduler = scheduler
    tomadiff.apply(pipe, interval=2)
    image = torch.zeros(1, 4, 16, 16)
    for strength, steps in ((0.5, [0, 1, 2, 4, 6, 7]), (1.0, [*range(0, 16, 2), 15])):
        with steps_that_run(pipe) as ran:
            pipe(image=image, strength=strength, num_inference_steps=16, **PROMPT)
        assert ran == steps


def test_the_last_steps_stay_dense_where_a_refiner_does_the_rest() -> None:
    pipe = tomadiff.apply(make("sdxl"), ratio=[(0, 0.5), (0.6, 0)])
    draw(pipe, steps=10, denoising_end=0.5)
    assert calls(pipe) == (5, 2)
    draw(pipe, steps=5)
    assert calls(pipe) == (10, 4)


def test_the_last_steps_stay_dense_where_a_table_has_one_time_too_many() -> None:
    case = tiny("stable_cascade")
    pipe = tomadiff.apply(case.pipeline(build(case)), ratio=[(0, 0.5), (0.5, 0)])
    draw_case(pipe, case)
    assert calls(pipe) == (2, 1)


def test_a_pipeline_of_the_same_parts_counts_steps_when_the_first_is_gone() -> None:
    pipe = tomadiff.apply(make("sd1"), ratio=[(0, 0.5), (0.6, 0)])
    pipe = remade(pipe, StableDiffusionPipeline)
    gc.collect()
    draw(pipe, steps=4)
    assert calls(pipe) == (4, 2)


def test_all_views_of_a_wide_picture_belong_to_one_step_each_with_plans_of_its_own() -> None:
    """The pipeline gives each view a scheduler's state of its own, which it swaps in."""
    pipe = remade(make("sd1"), StableDiffusionPanoramaPipeline)
    pipe.scheduler = DDIMScheduler()
    views = functools.partial(pipe.get_views, window_size=8, stride=1)
    pipe.get_views = views
    tomadiff.apply(pipe, ratio=[(1, 0.5)])
    pipe(height=64, width=128, num_inference_steps=3, **PROMPT)
    report = tomadiff.report(pipe)
    assert report.generations == 1
    count = len(views(64, 128))
    assert calls(pipe) == (3 * count, count)
    assert report.refreshes["destinations"] == count * len(report.sites)


def test_requests_may_come_and_go_in_a_batch_each_at_a_time_of_its_own() -> None:
    """As in a server that fills up its batches: who comes gets no plan of who was there before."""
    unet = tomadiff.apply(make("sd1").unet, ratio=0.5)
    stays, *others = torch.randn(5, 1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    leave, come = others[:2], others[2:]

    @torch.no_grad()
    def call(samples: list[torch.Tensor], times: list[float]) -> torch.Tensor:
        states = text(0)[0].expand(len(samples), -1, -1)
        return unet(torch.cat(samples), torch.tensor(times), states, return_dict=False)[0]

    alone = torch.cat([call([one], [940.0]) for one in come])
    call([stays, *leave], [900.0, 40.0, 40.0])
    together = call([stays, *come], [880.0, 940.0, 940.0])
    assert mostly_alike(together[1:], alone)
