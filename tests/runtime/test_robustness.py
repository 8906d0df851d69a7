"""What goes wrong elsewhere: threads, interrupts, numbers that are none, and servers that never stop."""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from comparison import alike, distance, mostly_alike
from diffusers import DiffusionPipeline
from fuzzing import fuzz
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pipelines import denoiser, draw, every_pipeline_with, latents, make
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tomadiff
from tomadiff.core import regions
from tomadiff.core.select import TIE
from tomadiff.errors import ConfigError, UnsupportedModelError
from tomadiff.methods import METHODS as METHODS_BY_NAME
from tomadiff.methods import PlanSettings, todo, toma, tome
from tomadiff.models import family_of

SPAN: dict[str, Any] = {"where": "span"}
FORECAST = {"ratio": 0.5, "interval": 2}
# what all models of a process share
CACHES = (regions.partition, regions.slot_layout, todo._downsampled, tome._split)


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
        (("sd3", "sd3"), FORECAST),
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
    # up to rounding: a new thread may have another number of torch's threads, and sums are split by them
    for one, other in zip(alone, together):
        assert sum(map(alike, one, other)) >= len(requests) - 1


def test_a_model_that_two_threads_call_at_once_is_refused_and_goes_on_after() -> None:
    """Plans are for one call at a time, and dense models know nothing of the kind: so it must be told."""
    pipe, seeds = patched("flux", **SPAN), (0, 1, 2)
    expected = draw(pipe, seeds)
    inside, finished = threading.Event(), threading.Event()
    inner = pipe.transformer.transformer_blocks[1].ff  # a hook on the block itself would cut the span

    def wait(*_: Any) -> None:
        inside.set()
        assert finished.wait(600)

    handle = inner.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(draw, pipe, seeds)
        assert inside.wait(600)
        handle.remove()
        with pytest.raises(ConfigError, match=r"in the middle of a call.*take turns"):
            draw(make_other(pipe), seeds=(3,))
        finished.set()
        assert mostly_alike(slow.result(), expected), "the one that came first has what it came for"
    assert torch.equal(draw(pipe, seeds), expected)


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
    # not those of compilers, which have no values
    return [held for held in gc.get_objects() if type(held) in (Tensor, nn.Parameter)]


def resident() -> int:
    """Bytes of memory that the process holds, without what it or the system could give back."""
    ctypes.CDLL(None).malloc_trim(0)
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("whole", [True, False], ids=["pipeline", "bare model"])
def test_200_requests_of_changing_sizes_take_no_more_memory_and_do_not_meet(whole: bool) -> None:
    server, order = make("flux"), random.Random(0).choices(range(len(REQUESTS)), k=198)
    target = server if whole else server.transformer
    alone = [draw((tomadiff.apply(target), server)[1], **request) for request in REQUESTS]
    tomadiff.apply(target)
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
    draw(patched("flux", **FORECAST), steps=4)  # whatever is made once
    count = len(tensors())
    gc.disable()
    try:
        for ratio in (0.25, 0.5):
            with tomadiff.merged(pipe, ratio=ratio, interval=2):
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
    first = regions.partition((5, 7), "tile", 4, False, torch.device("cpu"))
    for side in range(1, 200):
        regions.partition((side, 3), "tile", 4, False, torch.device("cpu"))
        regions.slot_layout((side, 3), 0.5, torch.device("cpu"))
        tome._split((side, 3), False, torch.device("cpu"))
        todo._downsampled((side, 3), 2, False, torch.device("cpu"))
    assert all(cache.cache_info().currsize <= 64 for cache in CACHES)
    again = regions.partition((5, 7), "tile", 4, False, torch.device("cpu"))
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
        self.work.append(self.patch.times.phase or "model")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "whole", "settings"),
    [
        ("flux", True, SPAN),
        ("flux", False, {"where": "module", "shift": True, **FORECAST}),
        (
            "flux",
            False,
            {"where": "block", "method": "tofu", "refresh_destinations": 9, "refresh_weights": 9},
        ),
        ("sd1", False, FORECAST),
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
    [("sd1", FORECAST), ("sdxl", {"method": "tome"}), ("sd3", {"where": "kv"}), ("flux", SPAN)],
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
    last = list(patch.sites[-1].bound.block.children())[-1]  # a hook on the block itself would cut its span
    for good_calls in (0, 2):
        left = iter(range(good_calls))

        def fail(*_: Any, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise ZeroDivisionError

        handle = last.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            draw(pipe, seeds=(1,), **call)
        handle.remove()
        assert patch.generation is None and patch.call is None
        assert torch.equal(draw(pipe, **call), expected)


# -- numbers that are none ---------------------------------------------------------------------------------

METHODS: list[dict[str, Any]] = [
    *(SPAN, {"where": "block"}, {"where": "module"}, {"where": "kv"}, {"preset": "toma"}, FORECAST),
    *(
        {"unmerge": "pinv", "scale": 1.0},
        {"unmerge": "regression"},
        {"regions": "stripe", "shift": True},
        {"weigh_keys": True},
    ),
    *({"method": "tome"}, {"method": "tofu"}, {"method": "todo"}),
    {"method": "tome", "where": "block", **FORECAST},
]


@pytest.fixture(params=every_pipeline_with(METHODS), ids=str)
def broad(request: pytest.FixtureRequest) -> DiffusionPipeline:
    """Every pipeline with every method."""
    name, settings = request.param
    return patched(name, **settings)


def test_nan_and_infinity_harm_nobody_but_their_own_picture(broad: DiffusionPipeline) -> None:
    """They crash nothing, and leave the picture beside them and the next ones alone."""
    size = (48, 80)
    steps = 4 if denoiser(broad)._tomadiff.config.interval == 2 else 2
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


@pytest.mark.parametrize("method", METHODS_BY_NAME)
def test_plans_do_not_depend_on_torchs_default_type(method: str) -> None:
    x = torch.randn(2, 63, 8, generator=torch.Generator().manual_seed(0))

    def made() -> list[Tensor]:
        ratio = 0.75 if method == "todo" else 0.5
        plan = METHODS_BY_NAME[method].plan(x, (7, 9), ratio, PlanSettings(), depth=0.3)
        merged = plan.merge(x)
        return [plan.destinations, merged, plan.unmerge(merged), plan.log_sizes()]

    expected = made()
    torch.set_default_dtype(torch.float64)
    try:
        assert all(map(torch.equal, made(), expected))
    finally:
        torch.set_default_dtype(torch.float32)


def test_half_precision_is_finite_and_close() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "halves.py"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


# -- anything at all ---------------------------------------------------------------------------------------

TOMA = {
    "regions": st.sampled_from(["tile", "stripe", "global"]),
    "region_size": st.sampled_from([8, 2, 3, 4, 5, 16]),
    "assign": st.sampled_from(["region", "global"]),
    "scale": st.sampled_from([1000.0, 30.0, 1.0]),
    "unmerge": st.sampled_from(["transpose", "pinv", "regression"]),
    "share": st.sampled_from(["block", "kind"]),
    "refresh_destinations": st.sampled_from([4, 2, 6]),
    "refresh_weights": st.sampled_from([1, 2]),
    "interval": st.sampled_from([1, 2, 3, [0, 1, 3]]),
    "dense_blocks": st.sampled_from([0, 1]),
    "weigh_keys": st.booleans(),
    "shift": st.booleans(),
}
MATCHING = {name: TOMA[name] for name in ("interval", "weigh_keys", "shift")}
RATIOS = st.sampled_from([0.5, 0.05, 0.25, 0.3, 0.66, 0.75, 0.9, 0.97])


@st.composite
def any_settings(draw: st.DrawFn, offers: list[str]) -> dict[str, Any]:
    """Most of them fit together; those that don't are refused."""
    method = draw(st.sampled_from(["toma", "toma", "toma", "tome", "tofu", "todo"]))
    known = TOMA if method == "toma" else MATCHING
    names = draw(st.lists(st.sampled_from(sorted(known)), max_size=6, unique=True))
    ratio = draw(st.sampled_from([0.75, 8 / 9]) if method == "todo" else RATIOS)
    where = "kv" if method == "todo" else draw(st.sampled_from(offers))
    return {"method": method, "ratio": ratio, "where": where} | {name: draw(known[name]) for name in names}


@pytest.mark.parametrize("name", tiny.NAMES)
def test_any_settings_merge_any_grid_or_are_refused(name: str) -> None:
    """Never another error; numbers that are some, of the right shape, and the same in every batch."""
    case = tiny.tiny(name)
    model = tiny.build(case)
    offers = sorted(family_of(model).offers)
    plain = getattr(case, "GRID", (8, 8))
    side = st.integers(2, 8)
    if hasattr(case, "LEVELS"):  # sides that a UNet can't halve are tested elsewhere
        side = side.map(lambda half: 2 * half)
    grids = st.tuples(*(st.integers(1, frames) for frames in plain[:-2]), side, side)

    def outputs(grid: tuple[int, ...], seeds: tuple[int, ...], steps: int) -> Tensor:
        """[steps, B, ...]"""
        return torch.stack(
            [tiny.run(model, case, seeds, grid, time) for time in (0.9, 0.7, 0.5, 0.3)[:steps]]
        )

    @fuzz(name, share=50)
    @given(any_settings(offers), grids, st.integers(0, 5), st.integers(1, 4))
    @example({"where": offers[0]}, plain, 0, 2)
    def merge(chosen: dict[str, Any], grid: tuple[int, ...], first: int, steps: int) -> None:
        seeds = (first, first + 1)
        try:
            dense = outputs(grid, seeds, steps)
        except RuntimeError:
            assume(grid == plain)  # some models take squares alone, or a number of frames
            raise
        try:
            tomadiff.apply(model, **chosen)
            together = outputs(grid, seeds, steps)
            alone = torch.cat([outputs(grid, (seed,), steps) for seed in seeds], dim=1)
        except (ConfigError, UnsupportedModelError) as refused:
            assert len(chosen) > 1 and len(str(refused)) > 20
            return
        finally:
            tomadiff.remove(model)
        assert together.shape == dense.shape and together.isfinite().all()
        assert torch.equal(outputs(grid, seeds, 1)[0], dense[0])
        if torch.allclose(outputs(grid, seeds[1:], 1)[0, 0], dense[0, -1], atol=1e-4):  # not in every model
            assert any(distance(alone[:, row], together[:, row]) < 1e-3 for row in range(len(seeds)))

    merge()


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    st.integers(0, 2**31 - 1),
    st.one_of(st.tuples(*[st.integers(1, 11)] * 2), st.tuples(*[st.integers(1, 4)] * 3)),
    st.sampled_from(["tile", "stripe", "global"]),
    st.integers(2, 6),
    st.sampled_from(["region", "global"]),
    st.floats(0, 0.95),
    st.booleans(),
)
def test_plans_equal_a_literal_version_on_any_grid(
    number: int, grid: tuple[int, ...], kind: str, size: int, assign: str, ratio: float, shifted: bool
) -> None:
    assume(not (shifted and kind == "global"))
    x = torch.randn(1, math.prod(grid), 6, generator=torch.Generator().manual_seed(number))
    config = PlanSettings(regions=kind, region_size=size, assign=assign, scale=20.0)
    plan = toma.plan(x, grid, ratio, config, shifted=shifted)
    merging = plan.merge(torch.eye(math.prod(grid))[None])[0].double()
    unmerging = plan.unmerge(torch.eye(plan.destinations.shape[1])[None])[0].double()
    expected = literal(x[0].double(), regions_of(grid, kind, size, shifted), ratio, assign)
    assert sorted(plan.destinations[0].tolist()) == sorted(expected)
    for place, destination in enumerate(plan.destinations[0].tolist()):
        shares = expected[destination]
        torch.testing.assert_close(unmerging[:, place], shares, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(merging[place], shares / shares.sum(), atol=1e-4, rtol=1e-3)


def regions_of(grid: tuple[int, ...], kind: str, size: int, shifted: bool) -> list[list[int]]:
    """The tokens of each region in their order, token by token."""
    if kind != "tile":
        grid, size = (math.prod(grid),), size**2 if kind == "stripe" else math.prod(grid)
    sizes = [1] * (len(grid) - 2) + [size] * 2 if len(grid) > 2 else [size] * len(grid)
    found: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for token, place in enumerate(itertools.product(*map(range, grid))):
        if shifted:  # round the edges
            place = tuple((at - min(most, side) // 2) % side for at, side, most in zip(place, grid, sizes))
        region = []
        for at, side, most in zip(place, grid, sizes):
            parts = math.ceil(side / most)
            larger = side % parts  # so many parts have one more than the others, and come first
            bounds = itertools.accumulate(side // parts + (part < larger) for part in range(parts))
            region.append(next(part for part, end in enumerate(bounds) if at < end))
        found.setdefault(tuple(region), []).append((place, token))
    return [[token for _, token in sorted(tokens)] for tokens in found.values()]


def literal(x: Tensor, regions: list[list[int]], ratio: float, assign: str) -> dict[int, Tensor]:
    """What each destination gets of each token, by trying every token in turn."""
    unit = x / x.norm(dim=-1, keepdim=True)
    similarity = unit @ unit.T
    chosen: dict[int, list[int]] = {}
    for number, tokens in enumerate(regions):
        picks: list[int] = []
        for _ in range(max(1, len(tokens) - math.floor(len(tokens) * ratio + 1e-9))):
            left = [(place, token) for place, token in enumerate(tokens) if token not in picks]
            values = {  # where two are as good, it is the first
                token: similarity[[*picks, token]][:, tokens].amax(0).sum().item() - TIE * place
                for place, token in left
            }
            picks.append(max(values, key=values.__getitem__))
        chosen[number] = picks
    everywhere = [pick for picks in chosen.values() for pick in picks]
    shares = {pick: torch.zeros(len(x), dtype=torch.double) for pick in everywhere}
    for number, tokens in enumerate(regions):
        picks = everywhere if assign == "global" else chosen[number]
        for token in tokens:
            for pick, share in zip(picks, torch.softmax(20.0 * similarity[picks, token], dim=0)):
                shares[pick][token] = share
    return shares
