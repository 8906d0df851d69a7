"""Which steps should run: the search is exact, and looks where outputs change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tomadiff.runtime.forecast import extrapolation
from tomadiff.tools.step_placement import dot_products, drift, exchange, place, placements, record, step_sizes


def errors(outputs: Tensor, sizes: Sequence[float], steps: Sequence[int]) -> float:
    """As the runtime forecasts them, one after another."""
    missed = enumerate(forecast_errors(outputs, steps))
    return sum(sizes[step] * float(error.norm()) for step, error in missed)


def forecast_errors(outputs: Tensor, steps: Sequence[int]) -> list[Tensor]:
    """Of all steps; nothing where the model runs."""
    errors = [torch.zeros_like(output) for output in outputs]
    for step in set(range(len(outputs))) - set(steps):
        ran = [each for each in steps if each < step][-3:]
        errors[step] = outputs[step] - torch.tensor(extrapolation(ran, step, len(outputs))) @ outputs[ran]
    return errors


@settings(max_examples=25, deadline=None)
@given(steps=st.integers(5, 9), seed=st.integers(0, 2**16), count=st.integers(4, 6))
def test_no_other_steps_have_a_smaller_error(steps: int, seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(steps, 3, generator=generator)
    sizes = torch.rand(steps, generator=generator).tolist()
    found = place(dot_products(outputs), sizes, [count])
    if count > steps:
        assert not found
        return
    others = combinations(range(2, steps - 1), count - 3)
    least = min(errors(outputs, sizes, [0, 1, *between, steps - 1]) for between in others)
    assert len(found[0]) == count and found[0][:2] == [0, 1] and found[0][-1] == steps - 1
    assert errors(outputs, sizes, found[0]) == pytest.approx(least, rel=1e-4)


def test_a_line_is_forecast_wherever_steps_run() -> None:
    outputs = torch.tensor([1.0, -2.0]) + torch.arange(12.0)[:, None] * torch.tensor([3.0, 0.5])
    (steps,) = place(dot_products(outputs), [1.0] * 12, [5])
    assert len(steps) == 5 and errors(outputs, [1.0] * 12, steps) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("jump", [5, 9, 14])
def test_steps_run_where_outputs_jump(jump: int) -> None:
    outputs = (torch.arange(20) >= jump).float()[:, None]
    (steps,) = place(dot_products(outputs), [1.0] * 20, [6])
    assert {jump, jump + 1} <= set(steps), "a line needs two points after the jump"


def test_errors_count_by_how_far_a_step_goes() -> None:
    outputs = torch.zeros(20, 2)
    outputs[5:, 0], outputs[12:, 1] = 1, 1
    sizes = np.ones(20)
    sizes[12:] = 0.01
    assert 5 in place(dot_products(outputs), sizes.tolist(), [5])[0]
    assert 12 in place(dot_products(outputs), (0.01 / sizes).tolist(), [5])[0]


def test_steps_are_exchanged_until_no_single_move_lets_errors_cancel_better() -> None:
    outputs, sizes = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), [1.0] * 12
    dots, equal = dot_products(outputs), [0, 1, 4, 7, 10, 11]
    found = exchange(dots, sizes, equal)
    assert len(found) == 6 and found[:2] == [0, 1] and found[-1] == 11
    least = drift(dots, sizes, found)
    assert least < drift(dots, sizes, equal)
    for old in found[2:-1]:
        for new in set(range(2, 11)) - set(found):
            assert drift(dots, sizes, sorted({*found, new} - {old})) >= least
    total = torch.stack(forecast_errors(outputs, found)).sum(0)
    assert least == pytest.approx(float(total.norm()), rel=1e-4)


class Doubler(nn.Module):
    def forward(self, sample: Tensor) -> tuple[Tensor]:
        return (sample * 2,)


def flow(steps: int) -> FlowMatchEulerDiscreteScheduler:
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(steps)
    return scheduler


def test_all_calls_of_a_step_are_recorded() -> None:
    model, pipeline = Doubler(), SimpleNamespace(scheduler=flow(3))
    calls = [torch.tensor([float(number)]) for number in range(6)]

    def draw() -> None:
        for call in calls:
            model(call)

    dots = record(model, pipeline, draw)
    inputs = torch.cat(calls).view(3, 2)
    images = inputs - pipeline.scheduler.sigmas[:3, None] * 2 * inputs  # the outputs are taken for flows
    assert dots is not None and np.allclose(dots, (images @ images.mT).numpy(), rtol=1e-5, atol=1e-5)
    assert not model._forward_hooks
    calls.pop()
    assert record(model, pipeline, draw) is None, "5 calls in 3 steps: whose are they?"
    assert placements(model, pipeline, [draw]) == []


def test_steps_are_not_placed_where_noise_comes_in() -> None:
    def draw() -> None:
        raise AssertionError("no picture is needed to know that")

    assert placements(Doubler(), SimpleNamespace(scheduler=EulerAncestralDiscreteScheduler()), [draw]) == []


def test_the_size_of_a_step_is_how_far_the_clean_image_moves_the_latents() -> None:
    scheduler = flow(4)
    assert step_sizes(scheduler) == pytest.approx((-scheduler.sigmas.diff() / scheduler.sigmas[:-1]).tolist())
    assert step_sizes(scheduler, sign=0) == pytest.approx((-scheduler.sigmas.diff()).tolist())
    del scheduler.sigmas
    assert step_sizes(scheduler) == [1.0] * 4
