"""--offload: weights that stay in main memory, and pictures that don't change by it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from comparison import alike
from diffusers import DiffusionPipeline
from pipelines import draw, make

import tomadiff
from tomadiff.tools import loading
from tomadiff.tools.arguments.names import OFFLOADS
from tomadiff.tools.bench import command as bench
from tomadiff.tools.bench import session
from tomadiff.tools.cli import main
from tomadiff.tools.evaluate import command as evaluate
from tomadiff.tools.loading import place
from tomadiff.tools.ui.generation import checked
from tomadiff.tools.ui.runner import Cancelled
from tomadiff.tools.ui.studio import Studio


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


class Placed(Exception):
    """Raised where a pipeline would go to the GPU, with what was asked for."""


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "fox"],
        ["merge-map", "fox"],
        ["eval", "--limit", "1"],
        ["tune", "--limit", "1", "--psnr", "35"],
        pytest.param(["ui"], marks=pytest.mark.skipif(not find_spec("gradio"), reason="a page needs Gradio")),
        ["bench", "--model", "emoji-flux"],
        ["bench"],  # of random weights
    ],
    ids=" ".join,
)
def test_commands_offload_what_they_load(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(pipe: DiffusionPipeline, device: str, offload: str | None = None) -> DiffusionPipeline:
        if device == "cuda":
            raise Placed(offload)
        return place(pipe, device, offload)

    for module in (loading, session):
        monkeypatch.setattr(module, "place", go)
    for module in (loading, bench, evaluate):
        monkeypatch.setattr(module, "check_device", lambda device: None)  # there may be no GPU
    monkeypatch.setattr(session.models, "build", lambda *how: make("flux"))
    monkeypatch.chdir(tmp_path)
    for name in ("GRADIO_TEMP_DIR", "GRADIO_ANALYTICS_ENABLED"):  # the page sets these for its process
        monkeypatch.setenv(name, "")
    with pytest.raises(Placed, match="group"):
        main([*command, "--device", "cuda", "--offload", "group"])


def test_work_on_the_page_that_is_cancelled_leaves_no_model_on_the_gpu() -> None:
    """As after a whole picture, diffusers offloads all models by hooking them anew."""
    studio = Studio("emoji-flux")
    place(studio.pipe, "cpu", "model")
    hooks: list[object] = []

    def tell(share: float, text: str) -> None:
        if text == "dense: step 1 of 2":
            hooks.extend(studio.pipe._all_hooks)
            studio.cancel("me")

    wanted = checked(studio.limits, prompt="fox", seed=1, steps=2, height=64, width=64)
    with pytest.raises(Cancelled):
        studio.compare(wanted, "me", tell)
    assert hooks and not {*hooks} & {*studio.pipe._all_hooks}


@pytest.mark.parametrize(
    "command", [["generate", "fox"], ["merge-map", "fox"], ["bench"], ["eval"], ["ui"]], ids=lambda c: c[0]
)
def test_offloading_needs_a_gpu(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)  # it is said before the page is made
    for offload in OFFLOADS:
        assert main([*command, "--offload", offload]) == 2
        assert f"--offload {offload} brings weights to a GPU: give --device cuda" in capsys.readouterr().err
