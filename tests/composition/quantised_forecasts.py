"""Forecasts beside weights of 8 bits, by torchao. test_composition.py runs it as a process."""

from __future__ import annotations

import pytest
import torch
from comparison import distance
from pipelines import denoiser, draw, make, steps_that_run
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import tomadiff


@pytest.mark.parametrize("name", ["sd1", "flux"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_steps_of_quantised_models_are_forecast(name: str, order: str) -> None:
    pipe = make(name)
    call = {"size": (64, 64), "steps": 8}
    full = draw(tomadiff.apply(pipe, interval=2), **call)
    if order == "before":
        tomadiff.remove(pipe)
    quantize_(denoiser(pipe), Int8WeightOnlyConfig())
    forecast = draw(tomadiff.apply(pipe, interval=2) if order == "before" else pipe, **call)
    with steps_that_run(pipe) as ran:
        assert torch.equal(draw(pipe, **call), forecast)
    assert set(ran) == {0, 2, 4, 6, 7}
    assert 1e-5 < distance(forecast, full) < 0.1
    tomadiff.remove(pipe)
    quantised = draw(pipe, **call)
    assert quantised.isfinite().all() and 1e-5 < distance(forecast, quantised) < 0.2
