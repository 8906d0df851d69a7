"""What outputs say about clean images: every scheduler is run, to see what it takes an output for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from denoising_loops import Case, loop
from diffusers import (
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
)
from torch import Tensor

from tomadiff.runtime.forecast import History
from tomadiff.runtime.prediction import DIFFUSION, FLOW_MATCHING, NoisyInput, Terms, prediction_of
from tomadiff.runtime.sampling import SCHEDULERS

V, FLOW, SAMPLE = ({"prediction_type": kind} for kind in ("v_prediction", "flow_prediction", "sample"))
FLOW_SIGMAS = FLOW | {"use_flow_sigmas": True}
SCALED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}  # Stable Diffusion's
CASES = [
    *(Case(name, SCALED) for name in ("DDIMScheduler", "DDPMScheduler", "PNDMScheduler", "TCDScheduler")),
    *(Case(name, SCALED) for name in ("DDIMParallelScheduler", "DDPMParallelScheduler", "SASolverScheduler")),
    Case("CogVideoXDPMScheduler", SCALED | V),
    Case("LTXEulerAncestralRFScheduler"),
    *(Case(name, SCALED | V) for name in ("DDIMScheduler", "CogVideoXDDIMScheduler", "LCMScheduler")),
    Case("LCMScheduler", SCALED),
    Case("DDIMScheduler", SCALED | {"clip_sample": False}, {"eta": 1.0}),
    *(Case("EulerDiscreteScheduler", SCALED | more) for more in ({}, V, SAMPLE, {"use_karras_sigmas": True})),
    *(Case("EulerAncestralDiscreteScheduler", SCALED | more) for more in ({}, V)),
    Case("LMSDiscreteScheduler", SCALED),
    *(Case("DPMSolverMultistepScheduler", SCALED | more) for more in ({}, V, SAMPLE)),
    Case("DPMSolverMultistepScheduler", SCALED | {"algorithm_type": "sde-dpmsolver++"}),
    *(Case(name, SCALED) for name in ("UniPCMultistepScheduler", "DEISMultistepScheduler")),
    *(Case(name, FLOW_SIGMAS) for name in ("DPMSolverMultistepScheduler", "UniPCMultistepScheduler")),
    Case("FlowMatchEulerDiscreteScheduler"),
    Case("FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "stochastic_sampling": True}),
    Case("FlowMatchEulerDiscreteScheduler", {"invert_sigmas": True}),
    Case("FlowMatchLCMScheduler"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_output_that_stands_for_an_image_leads_every_scheduler_to_it(case: Case) -> None:
    image = torch.linspace(-0.9, 0.9, 24).view(1, 8, 3)
    sampler = loop(case, lambda step: step)
    prediction = prediction_of(None, sampler.scheduler)
    assert prediction is not None
    index = 0

    def model(sample: Tensor, time: Any) -> Tensor:
        nonlocal index
        terms = prediction.at(index)
        index += 1
        output = NoisyInput(sample, terms).output(0, image)
        assert torch.allclose(NoisyInput(sample, terms).image(0, output), image, atol=1e-3)
        return output

    sampler.model = model
    drawn = sampler.path()[-1]
    if not case.config.get("invert_sigmas"):
        assert (drawn - image).abs().max() < 0.12, "some leave the noise of the first of 1000 timesteps"
        assert torch.corrcoef(torch.stack([drawn.flatten(), image.flatten()]))[0, 1] > 0.99
    else:
        assert torch.allclose(drawn, image, atol=1e-4)


def test_every_scheduler_whose_outputs_are_converted_is_tried() -> None:
    tried = {case.name.removesuffix("Scheduler") for case in CASES}
    assert tried == {*DIFFUSION, *FLOW_MATCHING}
    assert {f"{name}Scheduler" for name in tried} <= set(SCHEDULERS)


def test_outputs_for_other_schedulers_are_forecast_as_they_are() -> None:
    for scheduler in (HeunDiscreteScheduler(), EDMEulerScheduler()):
        scheduler.set_timesteps(4)
        assert prediction_of(None, scheduler) is None


def test_a_pipeline_that_negates_outputs_has_other_signs() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    plain, negated = prediction_of(None, scheduler), prediction_of(None, scheduler, sign=-1)
    assert plain is not None and negated is not None
    assert torch.equal(negated.of_input, -plain.of_input) and torch.equal(negated.of_image, -plain.of_image)
    assert prediction_of(None, scheduler, sign=0) is None


def test_a_pipeline_may_say_what_its_model_predicts() -> None:
    scheduler = EulerDiscreteScheduler()
    scheduler.set_timesteps(3)
    pipeline = SimpleNamespace(output_terms=lambda times: (2 * times, times + 1))
    prediction = prediction_of(pipeline, scheduler)
    assert prediction is not None and torch.equal(prediction.of_input, 2 * scheduler.timesteps)
    assert prediction.at(3) is None, "there are three steps"


TERMS = Terms(torch.tensor(3.0), torch.tensor(-2.0))


@pytest.mark.parametrize("shape", [(1, 4, 6, 6), (1, 9, 6, 6), (1, 4, 6, 12)], ids=str)
def test_what_follows_the_noisy_image_in_the_input_is_left_out(shape: tuple[int, ...]) -> None:
    sample, output = torch.randn(shape), torch.randn(1, 4, 6, 6)
    noisy = NoisyInput(sample, TERMS)
    image = noisy.image(0, output)
    assert torch.allclose(image, (output - 3 * sample[:, :4, :6, :6]) / -2)
    assert torch.allclose(noisy.output(0, image), output, atol=1e-5)


@pytest.mark.parametrize(
    "sample", [torch.randn(1, 2, 6, 6), torch.randn(1, 4, 36), None], ids=["less", "flat", "-"]
)
def test_an_output_of_another_shape_is_forecast_as_it_is(sample: Tensor | None) -> None:
    output = torch.randn(1, 4, 6, 6)
    assert NoisyInput(sample, TERMS).image(0, output) is output


def test_a_list_of_images_is_converted_one_by_one() -> None:
    samples, outputs = (
        [torch.randn(4, 1, 3), torch.randn(4, 1, 5)],
        [torch.randn(4, 1, 3), torch.randn(4, 1, 5)],
    )
    for i, (sample, output) in enumerate(zip(samples, outputs)):
        assert torch.allclose(NoisyInput(samples, TERMS).image(i, output), (output - 3 * sample) / -2)


def test_with_fresh_noise_the_last_image_is_held_whatever_the_noise() -> None:
    image, history = torch.randn(2, 4), History()
    history.hold = True
    for step in (0, 1):
        noisy = NoisyInput(1000 * torch.randn(2, 4), TERMS)
        history.add(step, noisy.output(0, image + step), noisy)
    noisy = NoisyInput(1000 * torch.randn(2, 4), Terms(torch.tensor(0.5), torch.tensor(7.0)))
    assert torch.allclose(history.forecast(2, noisy), noisy.output(0, image + 1), atol=0.1)


@pytest.mark.parametrize("hold", [True, False])
def test_a_sample_whose_output_is_not_what_it_is_taken_for_is_forecast_as_it_is(hold: bool) -> None:
    """The first sample's output stands for its image, the second's does not depend on the input at all."""
    image, constant, history = torch.randn(1, 4), torch.randn(1, 4), History()
    history.hold = hold
    for step in range(3):
        noisy = NoisyInput(10 * torch.randn(2, 4), TERMS)
        history.add(step, torch.cat([noisy.output(0, image.expand(2, 4))[:1], constant]), noisy)
    noisy = NoisyInput(10 * torch.randn(2, 4), TERMS)
    right, wrong = history.forecast(3, noisy)
    assert torch.allclose(right, noisy.output(0, image.expand(2, 4))[0], atol=1e-3)
    assert torch.allclose(wrong, constant[0], atol=1e-3)
