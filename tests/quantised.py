"""Linear layers with weights of 8 bits, by torchao. composition/test_composition.py runs it as a process."""

from __future__ import annotations

import pytest
import torch
from comparison import distance, mostly_alike
from pipelines import denoiser, draw, make
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    quantize_,
)

import tomadiff

SIZE = (64, 64)  # products of int8 are slow on CPUs


@pytest.mark.parametrize(
    ("name", "where", "config"),
    [
        ("sd1", "span", Int8WeightOnlyConfig),
        ("sdxl", "module", Int8WeightOnlyConfig),
        ("sd3", "kv", Int8WeightOnlyConfig),
        ("flux", "span", Int8WeightOnlyConfig),
        ("flux", "module", Int8DynamicActivationInt8WeightConfig),
    ],
)
def test_quantised_layers_run_on_merged_tokens(name: str, where: str, config: type) -> None:
    pipe = make(name)
    merged = draw(tomadiff.apply(pipe, ratio=0.5, where=where), size=SIZE)
    tomadiff.remove(pipe)
    quantize_(denoiser(pipe), config())
    layers = [part for part in denoiser(pipe).modules() if isinstance(part, torch.nn.Linear)]
    assert all(isinstance(layer.weight, Int8Tensor) for layer in layers)
    quantised = draw(pipe, size=SIZE)
    both = draw(tomadiff.apply(pipe, ratio=0.5, where=where), size=SIZE)
    more = draw(pipe, seeds=(0, 1, 2), size=SIZE)
    assert all(site.kept < site.tokens for site in tomadiff.report(pipe).sites)
    assert 1e-4 < distance(both, merged) < 0.05 and distance(both, quantised) > 1e-3
    tomadiff.remove(pipe)
    assert torch.equal(draw(pipe, size=SIZE), quantised)
    twin = tomadiff.apply(make(name), ratio=0.5, where=where)
    quantize_(denoiser(twin), config())
    assert mostly_alike(draw(twin, seeds=(0, 1, 2), size=SIZE), more), "in either order"
