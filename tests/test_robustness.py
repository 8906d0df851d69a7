"""What goes wrong elsewhere: threads, interrupts, numbers that are none, and servers that never stop."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from pipelines import denoiser, draw, latents, make
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tomadiff
from tomadiff.core import regions
from tomadiff.errors import ConfigError
from tomadiff.methods import todo, tome

SPAN: dict[str, Any] = {"where": "span"}
REMEMBER = {"remember": True, "dense_steps": 1, "dense_every": 3}
CACHES = (regions.cut, regions.slots, todo._downsampled, tome._split)  # what all models of a process share


def patched(name: str, whole: bool = True, **settings: Any) -> DiffusionPipeline:
    pipe = make(name)
    tomadiff.apply(pipe if whole else denoiser(pipe), **settings)
    return pipe


# -- threads -----------------------------------------------------------------------------------------------


@contextmanager
def restless() -> Iterator[None]:
    """Threads take turns a thousand times as often as they would."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 1000)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        (("flux", "flux"), SPAN),
        (("sd1", "sd1"), {"where": "module", "shift": True}),
        (("sd3", "sd3"), REMEMBER),
        (("sdxl", "sd1"), {"method": "tofu"}),
        (("sd3", "flux"), {"method": "todo"}),
    ],
    ids=str,
)
def test_two_pipelines_in_two_threads_draw_what_each_draws_alone(
    names: tuple[str, str], settings: dict[str, Any]
) -> None:
    """Also where both fill the caches that they share."""
    pipes = [patched(name, **settings) for name in names]
    requests: list[dict[str, Any]] = [{"size": (96, 96)}, {"size": (80, 112)}, {"size": (96, 96), "steps": 4}]

    def serve(number: int, start: threading.Barrier | None = None) -> list[Tensor]:
        pictures = []
        for request in requests:
            if start:
                start.wait()
            pictures.append(draw(pipes[number], seeds=(number,), **request))
        return pictures

    alone = [serve(0), serve(1)]
    for cache in CACHES:
        cache.cache_clear()
    start = threading.Barrier(2)
    with restless(), ThreadPoolExecutor(2) as threads:
        together = list(threads.map(serve, range(2), [start] * 2))
    for one, other in zip(alone, together):
        assert all(map(torch.equal, one, other))


def test_a_model_that_two_threads_call_at_once_is_refused_and_goes_on_after() -> None:
    """Plans are for one call at a time, and dense models know nothing of the kind: so it must be told."""
    pipe = patched("flux", **SPAN)
    expected = draw(pipe)
    inside, finished = threading.Event(), threading.Event()
    block = pipe.transformer.transformer_blocks[1]

    def wait(*_: Any) -> None:
        inside.set()
        assert finished.wait(60)

    handle = block.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(draw, pipe)
        assert inside.wait(60)
        handle.remove()
        with pytest.raises(ConfigError, match=r"in the middle of a call.*take turns"):
            draw(make_other(pipe), seeds=(3,))
        finished.set()
        assert torch.equal(slow.result(), expected), "the one that came first has what it came for"
    assert torch.equal(draw(pipe), expected)


def make_other(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """A pipeline with the same model and a scheduler of its own, as one does for threads."""
    other = type(pipe)(**pipe.components | {"scheduler": type(pipe.scheduler)()})
    other.set_progress_bar_config(disable=True)
    return other


# -- servers -----------------------------------------------------------------------------------------------

REQUESTS: list[dict[str, Any]] = [
    {"size": (64, 64), "steps": 1},
    {"size": (64, 96), "steps": 2, "seeds": (1,)},
    {"size": (112, 80), "steps": 1, "seeds": (2, 3)},
    {"size": (80, 48), "steps": 4, "seeds": (4,), "guidance": 1.0},
    {"size": (48, 48), "steps": 9, "seeds": (5,), "guidance": 1.0},
    {"size": (48, 64), "steps": 2, "seeds": (6, 7, 8)},
    {"size": (128, 64), "steps": 1, "seeds": (9,)},
    {"size": (64, 64), "steps": 3, "seeds": (10,), "guidance": 1.0},
]


def tensors(collect: bool = True) -> list[Tensor]:
    if collect:
        gc.collect()
    return [held for held in gc.get_objects() if issubclass(type(held), Tensor)]


def resident() -> int:
    """Bytes of memory that the process holds, without what it could give back."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("whole", [True, False], ids=["pipeline", "bare model"])
def test_200_requests_of_changing_sizes_take_no_more_memory_and_do_not_meet(whole: bool) -> None:
    alone = [draw(patched("flux", whole), **request) for request in REQUESTS]
    server, order = patched("flux", whole), random.Random(0).choices(range(len(REQUESTS)), k=198)
    held = []
    for half in (order[:99], order[99:]):  # in the first, everything is met
        assert set(half) == set(range(len(REQUESTS)))
        for number in [*half, 0]:
            assert torch.equal(draw(server, **REQUESTS[number]), alone[number]), REQUESTS[number]
        live = tensors()
        held.append((len(live), sum(tensor.nbytes for tensor in live), resident()))
        del live
    (tensors_before, bytes_before, resident_before), (tensors_after, bytes_after, resident_after) = held
    assert (tensors_after, bytes_after) == (tensors_before, bytes_before)
    assert resident_after - resident_before < 2**20, "less than 11 KB a request, which is less than one plan"
    # nothing tells a bare model that it draws the same picture again, if it is done in one step
    assert not whole or tomadiff.report(server).generations == 200


def test_a_patch_takes_its_tensors_with_it_and_does_not_wait_for_the_collector() -> None:
    """As where a server applies another ratio for each request: on a GPU, the collector knows of no hurry."""
    pipe = make("flux")
    draw(patched("flux", **REMEMBER), steps=4)  # whatever is made once
    count = len(tensors())
    gc.disable()
    try:
        for ratio in (0.25, 0.5):
            with tomadiff.merged(pipe, ratio=ratio, **REMEMBER):
                draw(pipe, steps=4)
        left = len(tensors(collect=False)) - count
    finally:
        gc.enable()
    dense = make("flux")
    count = len(tensors())
    draw(dense, steps=4)
    assert left <= len(tensors()) - count, "no more than a dense pipeline leaves behind"


def test_layouts_of_any_number_of_sizes_are_kept_for_a_few() -> None:
    """What a process keeps for all models is bounded, and right again after it was dropped."""
    first = regions.cut((5, 7), "tile", 4, False, torch.device("cpu"))
    for side in range(1, 200):
        regions.cut((side, 3), "tile", 4, False, torch.device("cpu"))
        regions.slots((side, 3), 0.5, torch.device("cpu"))
        tome._split((side, 3), False, torch.device("cpu"))
        todo._downsampled((side, 3), 2, False, torch.device("cpu"))
    assert all(cache.cache_info().currsize <= 64 for cache in CACHES)
    again = regions.cut((5, 7), "tile", 4, False, torch.device("cpu"))
    assert again is not first and torch.equal(again.order, first.order)


# -- interrupts --------------------------------------------------------------------------------------------


class Interrupt(TorchDispatchMode):
    """Ctrl-C at an operation of torch's, by its number; else, a note of who is at work at each."""

    def __init__(self, model: nn.Module, at: int | None = None) -> None:
        super().__init__()
        self.patch, self.at, self.work = model._tomadiff, at, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(self.work) == self.at:
            raise KeyboardInterrupt
        self.work.append(self.patch.phase or "model")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "whole", "settings"),
    [
        ("flux", True, SPAN),
        ("flux", False, {"where": "module", "shift": True, **REMEMBER}),
        (
            "flux",
            False,
            {"where": "block", "method": "tofu", "refresh_destinations": 9, "refresh_weights": 9},
        ),
        ("sd1", False, REMEMBER),
        ("sd1", True, {"where": "module", "share": "kind"}),
        ("sd3", True, {"where": "kv"}),
        ("sdxl", False, {"method": "tome"}),
    ],
    ids=str,
)
def test_an_interrupt_anywhere_leaves_the_pipeline_usable(
    name: str, whole: bool, settings: dict[str, Any]
) -> None:
    """In plans, while merging and unmerging, in the model: the next picture is as if it were the first."""
    pipe = make(name)
    call: dict[str, Any] = {"size": (64, 96), "steps": 4, "guidance": 1.0}
    dense = draw(pipe, **call)
    tomadiff.apply(pipe if whole else denoiser(pipe), **settings)
    expected = draw(pipe, **call)
    with Interrupt(denoiser(pipe)) as whole_run:
        draw(pipe, seeds=(1,), **call)
    places = {work: [n for n, other in enumerate(whole_run.work) if other == work] for work in whole_run.work}
    assert {"plan", "model"} <= set(places)
    for numbers in places.values():
        at = random.Random(0).choice(numbers[: len(numbers) // 4])  # while there is more to come
        with pytest.raises(KeyboardInterrupt), Interrupt(denoiser(pipe), at):
            draw(pipe, seeds=(1,), latents=latents(pipe, 0, call["size"]), **call)  # another prompt
        assert torch.equal(draw(pipe, **call), expected)
    tomadiff.remove(pipe)
    assert torch.equal(draw(pipe, **call), dense)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("sd1", REMEMBER), ("sdxl", {"method": "tome"}), ("sd3", {"where": "kv"}), ("flux", SPAN)],
    ids=str,
)
@pytest.mark.parametrize("whole", [True, False], ids=["pipeline", "bare model"])
def test_an_error_in_a_block_leaves_nothing_of_its_generation_behind(
    name: str, settings: dict[str, Any], whole: bool
) -> None:
    pipe = patched(name, whole, **settings)
    call: dict[str, Any] = {"size": (64, 96), "steps": 4, "guidance": 1.0}
    expected = draw(pipe, **call)
    patch = denoiser(pipe)._tomadiff
    last = patch.sites[-1].place.block
    for good_calls in (0, 2):
        left = iter(range(good_calls))

        def fail(*_: Any, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise ZeroDivisionError

        handle = last.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            draw(pipe, seeds=(1,), **call)
        handle.remove()
        assert not patch.plans
        assert not any(hook.memories or hook.run.merged is not None for hook in patch.sites)
        assert torch.equal(draw(pipe, **call), expected)


# -- numbers that are none ---------------------------------------------------------------------------------

METHODS: list[dict[str, Any]] = [
    *(SPAN, {"where": "block"}, {"where": "module"}, {"where": "kv"}, {"preset": "toma"}, REMEMBER),
    *({"unmerge": "pinv", "scale": 1.0}, {"regions": "stripe", "shift": True}, {"weigh_keys": True}),
    *({"method": "tome"}, {"method": "tofu"}, {"method": "todo"}),
    {"method": "tome", "where": "block", **REMEMBER},
]


@pytest.fixture(params=METHODS, ids=str)
def broad(request: pytest.FixtureRequest, name: str) -> DiffusionPipeline:
    """Every pipeline with every method."""
    if name == "sd3" and "weigh_keys" in request.param:
        pytest.skip("SD3's attention takes no mask")
    return patched(name, **request.param)


def test_nan_and_infinity_harm_nobody_but_their_own_picture(broad: DiffusionPipeline) -> None:
    """They crash nothing, and leave the picture beside them and the next ones alone."""
    size = (48, 80)
    steps = 4 if denoiser(broad)._tomadiff.config.remember is True else 2
    call: dict[str, Any] = {"seeds": (0, 1, 2), "size": size, "steps": steps, "guidance": 1.0}
    healthy = draw(broad, **call)
    noise = torch.cat([latents(broad, seed, size) for seed in (0, 1, 2)])
    noise.flatten(1)[1, 5], noise.flatten(1)[2, 5] = float("nan"), float("inf")  # one number of a sample
    ill = draw(broad, latents=noise, **call)
    assert torch.equal(ill[0], healthy[0]) and not ill[1:].isfinite().any()
    assert torch.equal(draw(broad, **call), healthy)


def test_tokens_that_are_all_zeros_or_all_the_same_are_merged(broad: DiffusionPipeline) -> None:
    """These have no direction, or all have one, so that nothing tells destinations apart."""
    noise = torch.cat([torch.full_like(latents(broad, 0, (48, 80)), value) for value in (0.0, 1.0)])
    assert draw(broad, seeds=(0, 1), latents=noise, size=(48, 80), guidance=1.0).isfinite().all()
