"""--offload: weights that stay in main memory, and pictures that don't change by it."""

from __future__ import annotations

import pytest
from comparison import alike
from pipelines import draw, make

import tomadiff
from tomadiff.tools.arguments.names import OFFLOADS
from tomadiff.tools.cli import main
from tomadiff.tools.loading import place


@pytest.mark.parametrize("offload", ["model", "group"])  # layer by layer, pipelines don't run without a GPU
def test_an_offloaded_pipeline_draws_the_same(offload: str) -> None:
    expected = draw(tomadiff.apply(make("flux"), ratio=0.5), steps=3)
    pipe = place(make("flux"), "cpu", offload)  # from memory to memory
    assert alike(draw(tomadiff.apply(pipe, ratio=0.5), steps=3), expected)
    hooked = [name for name, module in pipe.transformer.named_modules() if hasattr(module, "_hf_hook")]
    grouped = [m for m in pipe.transformer.modules() if "group_offloading" in _hooks(m)]
    assert bool(hooked) == (offload == "model") and bool(grouped) == (offload == "group")


def _hooks(module: object) -> dict:
    registry = getattr(module, "_diffusers_hook", None)
    return {} if registry is None else registry.hooks


@pytest.mark.parametrize("command", [["generate", "fox"], ["bench"], ["eval"]], ids=lambda c: c[0])
def test_offloading_needs_a_gpu(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for offload in OFFLOADS:
        assert main([*command, "--offload", offload]) == 2
        assert f"--offload {offload} brings weights to a GPU: give --device cuda" in capsys.readouterr().err
