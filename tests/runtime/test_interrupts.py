"""Interrupts and copies at any point of putting tomadiff on a model and taking it off.

The same points in every run of the tests; `make fuzz` tries many others.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
from comparison import mostly_alike
from diffusers import DiffusionPipeline
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from pipelines import denoiser, draw, make
from torch import nn

import tomadiff

SETTINGS: dict[str, dict[str, Any]] = {
    "flux": {"ratio": 0.5, "where": "span"},
    "sd1": {"ratio": 0.5, "where": "module", "method": "tome"},
    "sd3": {"ratio": 0.5, "where": "kv"},
    "sdxl": {"ratio": 0.5, "interval": 2},
}


class Interrupts:
    """Ctrl-C at the lines of Python, of whatever library, with these numbers; without, it counts them."""

    def __init__(self, at: tuple[int, ...] = ()) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Interrupts:
        if event in ("line", "return"):
            self.lines += 1
            if self.lines in self.at:
                raise KeyboardInterrupt
        return self

    def during(self, act: Callable[[], Any]) -> None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            act()
        finally:
            sys.settrace(before)


def hooks_on(model: nn.Module) -> dict[str, dict[str, Any]]:
    """All that is set on the modules of a model beside parameters."""
    sizes = {}
    for name, module in model.named_modules():
        values = {key: value for key, value in vars(module).items() if key != "_parameters"}
        if not name:
            values.pop("_diffusers_hook", None)  # of diffusers' own pipelines
        sizes[name] = {
            key: len(value) if isinstance(value, dict | list) else type(value)
            for key, value in values.items()
        }
    return sizes


def in_a_block(pipe: DiffusionPipeline) -> None:
    with tomadiff.merged(pipe, ratio=0.25):
        pass


def prepare(pipe: DiffusionPipeline, chosen: dict[str, Any] | None) -> None:
    tomadiff.remove(pipe)
    if chosen is not None:
        tomadiff.apply(pipe, **chosen)


ACTS: dict[str, tuple[bool, Callable[[DiffusionPipeline, dict[str, Any]], Any]]] = {
    # whether there is something on the pipeline before, and what is done to it
    "apply": (False, lambda pipe, chosen: tomadiff.apply(pipe, **chosen)),
    "apply again": (True, lambda pipe, chosen: tomadiff.apply(pipe, ratio=0.25)),
    "remove": (True, lambda pipe, chosen: tomadiff.remove(pipe)),
    "merged": (False, lambda pipe, chosen: in_a_block(pipe)),
    "merged on top": (True, lambda pipe, chosen: in_a_block(pipe)),
    "deepcopy": (True, lambda pipe, chosen: copy.deepcopy(pipe)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_remove_succeeds_wherever_an_interrupt_came(name: str) -> None:
    """Also where a second one came while the first was dealt with; and nothing is left."""
    pipe, chosen = make(name), SETTINGS[name]
    dense, plain = draw(pipe), hooks_on(denoiser(pipe))
    tomadiff.apply(pipe, **chosen)
    expected = draw(pipe)
    totals = {}
    for act, (patched, do) in ACTS.items():
        prepare(pipe, chosen if patched else None)
        whole = Interrupts()
        whole.during(lambda do=do: do(pipe, chosen))
        totals[act] = whole.lines

    @fuzz(name, share=8)
    @given(st.sampled_from(list(ACTS)), st.integers(0, 2**31), st.none() | st.integers(1, 200))
    def interrupt(act: str, number: int, later: int | None) -> None:
        patched, do = ACTS[act]
        prepare(pipe, chosen if patched else None)
        first = random.Random(number).randrange(1, totals[act])
        interrupts = Interrupts((first, first + later) if later else (first,))
        came: list[bool] = []
        with pytest.MonkeyPatch.context() as patch:
            # Python swallows an interrupt that comes in a finalizer, and tells this hook instead
            patch.setattr(sys, "unraisablehook", lambda _: came.append(True))
            try:
                interrupts.during(lambda: do(pipe, chosen))
            except KeyboardInterrupt:
                came.append(True)
        assert came
        tomadiff.remove(pipe)
        assert hooks_on(denoiser(pipe)) == plain

    interrupt()
    assert torch.equal(draw(pipe), dense)
    tomadiff.apply(pipe, **chosen)
    assert torch.equal(draw(pipe), expected)


@pytest.mark.parametrize("name", ["sd1", "flux"])
def test_a_copy_is_made_while_another_thread_draws(name: str) -> None:
    """As the error for two threads on one model recommends: both draw what they should."""
    pipe, seeds = tomadiff.apply(make(name), **SETTINGS[name]), (0, 1, 2)
    expected, twin = draw(pipe, seeds), None
    with ThreadPoolExecutor(1) as threads:
        pictures = threads.submit(lambda: [draw(pipe, seeds) for _ in range(5)])
        while not pictures.done():
            twin = copy.deepcopy(pipe)
            time.sleep(0.01)  # or the other thread never has its turn
    assert all(mostly_alike(picture, expected) for picture in pictures.result())
    assert mostly_alike(draw(twin, seeds), expected)
    assert tomadiff.report(twin).model_calls["run"], "it is patched"
