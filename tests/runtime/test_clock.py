"""Generations, steps and calls are told apart by what the model is called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler

from tomadiff.runtime.clock import MAX_CALLS, Clock


class Scheduler:
    """As much of a scheduler as the clock looks at."""

    def __init__(self) -> None:
        self.step_index: int | None = None

    def set_timesteps(self, steps: int) -> torch.Tensor:
        self.timesteps = torch.linspace(999, 1, steps)
        self.step_index = None
        return self.timesteps


class Pipeline:
    def __init__(self) -> None:
        self.scheduler: Any = Scheduler()


def ticks(clock: Clock, times: list) -> list[tuple[int, int, int]]:
    seen = []
    with torch.no_grad():
        for time in times:
            clock.tick(time)
            seen.append((clock.generation, clock.step, clock.call))
    return seen


@pytest.mark.parametrize(
    "form", [float, torch.tensor, lambda t: torch.full((3,), t)], ids=["float", "0d", "batch"]
)
def test_a_time_that_goes_back_starts_a_generation(form) -> None:
    times = [form(t) for t in (999.0, 500.0, 1.0, 800.0, 300.0)]
    assert ticks(Clock(), times) == [(1, 0, 0), (1, 1, 0), (1, 2, 0), (2, 0, 0), (2, 1, 0)]


def test_timesteps_that_grow_from_noise_to_image() -> None:
    times = [torch.tensor([t]) for t in (0.0, 0.5, 0.9, 0.1, 0.4)]
    assert ticks(Clock(ascending=True), times) == [(1, 0, 0), (1, 1, 0), (1, 2, 0), (2, 0, 0), (2, 1, 0)]


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.expand(2)], ids=["entry", "expanded"])
def test_entries_of_a_timestep_table_are_steps_without_reading_them(view) -> None:
    table = torch.zeros(3)  # the values tell nothing, as on a device that must not be waited for
    again = torch.zeros(3)
    times = [view(t) for t in (*table, *again)]
    assert [t[:2] for t in ticks(Clock(), times)] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


def test_calls_at_the_same_time_belong_to_one_step() -> None:
    times = [torch.tensor([t]) for t in (900.0, 900.0, 500.0, 500.0, 900.0)]
    assert ticks(Clock(), times) == [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (2, 0, 0)]


def test_samples_at_times_of_their_own_share_no_step() -> None:
    times = [torch.tensor(pair) for pair in ([900.0, 500.0], [880.0, 480.0], [860.0, 860.0], [840.0, 840.0])]
    assert ticks(Clock(), times) == [(1, 0, 0), (2, 0, 0), (3, 0, 0), (3, 1, 0)]


def test_another_image_at_the_same_time_is_another_generation() -> None:
    """Of a bare model. Guidance asks about one image twice, now and then in batches of other sizes."""
    noise, other = torch.randn(2, 3, 4).unbind()
    samples = [noise, noise.clone(), torch.cat([noise, noise]), other, other]
    clock, seen = Clock(), []
    with torch.no_grad():
        for sample in samples:
            clock.tick(torch.tensor([900.0]), sample)
            seen.append((clock.generation, clock.call))
    assert seen == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]


def test_a_new_table_of_the_pipelines_scheduler_starts_a_generation() -> None:
    """Also with one step, where time never goes back."""
    pipeline = Pipeline()
    clock = Clock(pipeline)
    seen = []
    for _ in range(3):
        seen += ticks(clock, [t.clone() for t in pipeline.scheduler.set_timesteps(1)])
    assert seen == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]


def test_a_solver_that_calls_the_model_twice_at_a_timestep_makes_one_generation() -> None:
    pipeline = Pipeline()
    pipeline.scheduler = scheduler = FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps(3)
    clock, seen, sample = Clock(pipeline), [], torch.randn(2, 3)
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            clock.tick(timestep[None] / 1000, sample)
            seen.append((clock.generation, clock.step, clock.call))
            sample = scheduler.step(torch.randn(2, 3), timestep, sample).prev_sample
    assert seen == [(1, step, 0) for step in range(5)]


def test_single_step_generations_of_a_bare_model_never_pile_up() -> None:
    seen = ticks(Clock(), [999.0] * (MAX_CALLS + 1))
    assert seen[-2:] == [(1, 0, MAX_CALLS - 1), (2, 0, 0)]


def test_every_call_under_autograd_is_a_generation() -> None:
    clock = Clock()
    for time in (900.0, 500.0, 100.0):
        clock.tick(time)
    assert (clock.generation, clock.step) == (3, 0)


def test_steps_are_known_from_the_pipeline_alone() -> None:
    pipeline = Pipeline()
    pipeline.scheduler.set_timesteps(7)
    clock, bare = Clock(pipeline), Clock()
    for each in (clock, bare):
        each.tick(999.0)
    assert (clock.steps(), bare.steps()) == (7, None)
    pipeline.scheduler.begin_index = 3  # as image-to-image pipelines set it to skip some
    assert clock.steps() == 4


def test_the_device_is_never_waited_for_in_a_pipeline() -> None:
    """A meta tensor has no value: reading it would raise."""
    pipeline = Pipeline()
    clock = Clock(pipeline)
    pipeline.scheduler.set_timesteps(3)
    with torch.no_grad():
        for step in range(3):
            for call in range(2):  # prompt and negative prompt
                clock.tick(torch.empty(2, device="meta"))
                assert (clock.generation, clock.step, clock.call) == (1, step, call)
            pipeline.scheduler.step_index = step + 1
