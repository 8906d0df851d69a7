"""One line, `apply(pipe)`, on every pipeline that runs without downloads, in tiny."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from comparison import CHANGED, distance
from diffusers import DiffusionPipeline
from pipelines import MAKERS, make
from pipelines import draw as draw_prompt
from tiny import NAMES, build, tiny
from torch import Tensor

import tomadiff

STEPS = 8
# those that skip no step, and why
EVERY_STEP = {
    **dict.fromkeys(("anyflow", "prx"), "8 steps are too few"),
    **dict.fromkeys(("stable_cascade", "stable_cascade_decoder"), "DDPM adds noise at every step"),
    "uvit": "Amused draws tokens at every step",
}


def of(name: str) -> tuple[DiffusionPipeline, Callable[[], Tensor]]:
    """A pipeline, and what draws with it, the same each time."""
    if name in MAKERS:
        pipe = make(name)
        return pipe, lambda: draw_prompt(pipe, steps=STEPS)
    case = tiny(name)
    pipe = case.pipeline(build(case))
    pipe.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": STEPS, "output_type": "latent", "return_dict": False}

    def draw() -> Tensor:
        torch.manual_seed(0)  # for noise that no generator can be given for
        return torch.as_tensor(pipe(**call | case.request((0,)))[0])

    return pipe, draw


@pytest.mark.parametrize("name", [*MAKERS, *(n for n in NAMES if hasattr(tiny(n), "pipeline"))])
def test_without_settings_the_picture_repeats_and_removal_is_bit_exact(name: str) -> None:
    pipe, draw = of(name)
    dense = draw()
    tomadiff.apply(pipe)
    picture = draw()
    report = tomadiff.report(pipe)
    assert (report.steps["forecast"] == 0) == (name in EVERY_STEP), report.why
    assert EVERY_STEP.get(name, "") in report.why
    assert picture.isfinite().all() and (distance(picture, dense) > CHANGED or name == "uvit")
    assert torch.equal(draw(), picture)
    tomadiff.remove(pipe)
    assert torch.equal(draw(), dense)
