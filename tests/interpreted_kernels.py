"""The kernels against core, in Triton's interpreter (kernels/test_kernels.py) or on a GPU (tests/gpu)."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import denoiser, draw, make, text
from runtime import test_operators as operators
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import tomadiff
from tomadiff import core, kernels
from tomadiff.core import Plan, partition, similarity, slot_layout, unit_vectors
from tomadiff.core.select import TIE
from tomadiff.kernels import LARGEST, probe, select
from tomadiff.kernels import weights as weigh
from tomadiff.kernels.launch import Launch, repeats_of
from tomadiff.kernels.merge import _mix as mix
from tomadiff.kernels.merge import merge, unmerge
from tomadiff.kernels.plan import Fused
from tomadiff.kernels.select import destinations, facility_location
from tomadiff.kernels.weights import weights
from tomadiff.methods import PlanSettings, toma

# a plan is core's, unless a test says otherwise: on a GPU it would be the kernels' own
os.environ["TOMADIFF_KERNELS"] = "0"
DEVICE = torch.device(os.environ.get("TOMADIFF_TEST_DEVICE", "cpu"))
if DEVICE.type != "cpu":
    torch.set_default_device(DEVICE)
seeds = st.integers(0, 2**31 - 1)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
kinds = st.sampled_from(["tile", "stripe"])
grids = st.one_of(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
)


def features(seed: int, *shape: int) -> Tensor:
    """The same on every device."""
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(DEVICE)


def assert_greedy(picks: Tensor, similarity: Tensor, real: Tensor | None) -> None:
    """At each pick no other token would have been better, by more than rounding, for core's own objective."""
    for group, (chosen, s) in enumerate(zip(picks.tolist(), similarity.double())):
        left = torch.ones(len(s), dtype=torch.bool) if real is None else real[group].clone()
        weight, nearest = left.double(), torch.full((len(s),), -1e3, dtype=torch.double)
        for pick in chosen[: int(left.sum())]:
            value = (torch.maximum(s, nearest) * weight).sum(1) - TIE * torch.arange(len(s))
            assert left[pick], "picked twice, or padding"
            assert value[pick] >= value[left].max() - 1e-5
            left[pick], nearest = False, torch.maximum(nearest, s[pick])


# -- selection ---------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(seeds, st.integers(1, 24), st.data())
def test_selection_is_greedy_with_padding_of_any_length(seed: int, n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    lengths = data.draw(st.none() | st.lists(st.integers(1, n), min_size=3, max_size=3))
    real = None if lengths is None else torch.arange(n) < torch.tensor(lengths)[:, None]
    s = similarity(unit_vectors(features(seed, 3, n, 8)))
    picks = facility_location(s, k, real)
    assert picks.shape == (3, k) and picks.dtype == torch.long
    assert_greedy(picks, s, real)


@settings(max_examples=15, deadline=None)
@given(seeds, st.integers(1, 24), st.integers(1, 6), st.data())
def test_ties_go_where_core_takes_them(seed: int, n: int, kinds: int, data: st.DataObject) -> None:
    """Cosines of 0 and 1 are summed without rounding, so that nothing but the rule decides."""
    k = data.draw(st.integers(1, n))
    labels = torch.randint(kinds, (2, n), generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    s = similarity(unit_vectors(torch.eye(kinds)[labels.to(DEVICE)]))
    real = torch.arange(n) < torch.tensor([[n], [data.draw(st.integers(1, n))]])
    assert torch.equal(facility_location(s, k), core.facility_location(s, k))
    assert torch.equal(facility_location(s, k, real), core.facility_location(s, k, real))


def test_a_later_token_must_be_better_by_more_than_rounding() -> None:
    for lead, first in ((TIE / 2, 0), (TIE * 2, 1)):
        s = torch.tensor([[[1, 0.5, 0.25], [0.5, 1, 0.25 + lead], [0.25, 0.25 + lead, 1]]])
        assert facility_location(s, 1).item() == core.facility_location(s, 1).item() == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_destinations_at_the_size_of_a_real_tile_are_cores(dtype: torch.dtype) -> None:
    x = (2 + features(0, 2, 128, 100)).to(dtype)  # cosines near 0.8, and a last block of channels cut short
    config = PlanSettings()
    expected = toma.plan(x, (8, 16), 0.5, config).destinations
    regions = partition((8, 16), "tile", 8, False, DEVICE)
    assert torch.equal(destinations(x, regions, slot_layout(regions.lengths, 0.5, DEVICE)), expected)


@settings(max_examples=15, deadline=None)
@given(seeds, grids, kinds, st.booleans(), st.floats(0, 0.95), dtypes)
def test_destinations_are_greedy_on_any_grid(
    seed: int, grid: tuple, kind: str, shift: bool, ratio: float, dtype: torch.dtype
) -> None:
    regions = partition(grid, kind, 4, shift, DEVICE)
    places = slot_layout(regions.lengths, ratio, DEVICE)
    x = features(seed, 2, math.prod(grid), 20).to(dtype)
    chosen = destinations(x, regions, places)
    assert chosen.shape == (2, places.kept)
    picks = regions.places_of(places.unpack(chosen))
    real = torch.arange(regions.size) < torch.tensor(regions.lengths).repeat(2)[:, None]
    counts = [core.num_kept(length, ratio) for length in regions.lengths * 2]
    for group, (count, s) in enumerate(
        zip(counts, similarity(unit_vectors(regions.split(regions.arrange(x)))))
    ):
        assert_greedy(picks[group : group + 1, :count], s[None], real[group : group + 1])


def test_destinations_of_part_of_a_sequence_need_no_copy() -> None:
    regions = partition((8, 8), "tile", 4, False, DEVICE)
    places = slot_layout(regions.lengths, 0.5, DEVICE)
    sequence = features(1, 2, 5 + 64, 24)
    part = sequence[:, 5:]
    assert torch.equal(destinations(part, regions, places), destinations(part.clone(), regions, places))
    crossed = part.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(destinations(part, regions, places), destinations(crossed, regions, places))


def test_a_sample_gets_the_destinations_it_would_get_alone() -> None:
    regions = partition((9, 7), "tile", 4, False, DEVICE)
    places = slot_layout(regions.lengths, 0.5, DEVICE)
    x = features(2, 3, 63, 16)
    together = destinations(x, regions, places)
    for sample in range(3):
        assert torch.equal(together[sample], destinations(x[sample : sample + 1], regions, places)[0])


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_broken_features_still_give_tokens_of_the_image(value: float) -> None:
    regions = partition((5, 7), "tile", 4, False, DEVICE)
    chosen = destinations(torch.full((1, 35, 8), value), regions, slot_layout(regions.lengths, 0.5, DEVICE))
    assert ((chosen >= 0) & (chosen < 35)).all()


def test_regions_too_large_for_a_program_are_cores() -> None:
    s = similarity(unit_vectors(features(3, 1, LARGEST + 1, 8)))
    assert torch.equal(facility_location(s, 9), core.facility_location(s, 9))
    with pytest.raises(ValueError, match=str(LARGEST)):
        regions = partition((1, LARGEST + 1), "global", 8, False, DEVICE)
        destinations(features(3, 1, LARGEST + 1, 8), regions, slot_layout(regions.lengths, 0.5, DEVICE))


# -- a plan's matrices -------------------------------------------------------------------------------------


def assert_weights_are_cores(x: Tensor, plan: Plan, scale: float, regression: bool) -> None:
    """Up to rounding, which a sharp softmax multiplies by its scale, and regression by a system's condition.

    Rows of unmerging that are padding may be anything: nobody reads them.
    """
    found = weights(x, plan.regions, plan.slots, plan.destinations, scale, regression)
    real = plan.regions.real
    padding = 1.0 if real is None else real.repeat(len(x), 1)[..., None]
    names, masks = ("assignment", "merging", "unmerging"), (1.0, 1.0, padding)
    for name, matrix, mask in zip(names, found, masks):
        expected = getattr(plan, name)
        assert matrix.dtype == expected.dtype and matrix.shape == expected.shape
        error = 2e-3 if matrix.dtype == torch.float32 else 2e-3 + 2 * torch.finfo(matrix.dtype).eps
        torch.testing.assert_close(matrix * mask, expected * mask, rtol=error, atol=error, msg=name)


@settings(max_examples=25, deadline=None)
@given(
    seeds,
    grids,
    kinds,
    st.booleans(),
    st.floats(0, 0.95),
    dtypes,
    st.sampled_from([1.0, 1000.0]),
    st.booleans(),
    st.sampled_from([3, 16, 40]),
)
def test_weights_are_cores_on_any_grid(
    seed: int,
    grid: tuple,
    kind: str,
    shift: bool,
    ratio: float,
    dtype: torch.dtype,
    scale: float,
    regression: bool,
    channels: int,
) -> None:
    how = "regression" if regression else "transpose"
    config = PlanSettings(regions=kind, region_size=4, scale=scale, unmerge=how)
    text = 3  # before the image, so that features are a part of memory
    x = features(seed, 2, text + math.prod(grid), channels).to(dtype)[:, text:]
    plan = toma.plan(x, grid, ratio, config, shifted=shift)
    assert_weights_are_cores(x, plan, scale, regression)


@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-3])
@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_weights_at_the_size_of_a_real_tile_are_cores(ratio: float, spread: float) -> None:
    """Also of tokens that are all alike, up to a cosine of 1 - 1e-6."""
    x = 1 + spread * features(0, 2, 128, 100)
    plan = toma.plan(x, (8, 16), ratio, PlanSettings(unmerge="regression"))
    assert_weights_are_cores(x, plan, 1000.0, True)


def test_a_sample_gets_the_weights_it_would_get_alone() -> None:
    x = features(2, 3, 63, 16)
    plan = toma.plan(x, (9, 7), 0.5, PlanSettings(region_size=4, unmerge="regression"))
    layout = plan.regions, plan.slots
    together = weights(x, *layout, plan.destinations, 1000.0, True)
    for sample in range(3):
        one = slice(sample, sample + 1)
        alone = weights(x[one], *layout, plan.destinations[one], 1000.0, True)
        groups = slice(sample * plan.regions.count, (sample + 1) * plan.regions.count)
        assert all(torch.equal(a[groups], b) for a, b in zip(together, alone))


def test_broken_features_give_broken_weights() -> None:
    """As core does: a NaN must not become a picture that looks right."""
    x = features(0, 1, 64, 8)
    plan = toma.plan(x, (8, 8), 0.5, PlanSettings(region_size=4, unmerge="regression"))
    x[0, 0, 0] = math.nan
    for matrix in weights(x, plan.regions, plan.slots, plan.destinations, 1000.0, True):
        broken = matrix.isnan().flatten(1).any(1)
        assert broken[0] and not broken[1:].any(), "and other regions are as they were"


# -- merging -----------------------------------------------------------------------------------------------


def exactly(plan: Plan) -> Plan:
    """The same weights, to be multiplied in fp32."""
    return dataclasses.replace(plan, merging=plan.merging.float(), unmerging=plan.unmerging.float())


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal but for the rounding of the result, and for the order of sums in fp32."""
    assert found.dtype == dtype
    error = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(found.float(), expected, rtol=error, atol=max(1e-5, error / 16))


@settings(max_examples=25, deadline=None)
@given(
    seeds,
    grids,
    kinds,
    st.booleans(),
    st.floats(0, 0.95),
    dtypes,
    st.sampled_from([1.0, 1000.0]),
    st.sampled_from(["transpose", "pinv", "regression"]),
    st.sampled_from([1, 7, 32, 70]),
    st.integers(0, 3),
)
def test_merging_and_unmerging_are_cores(
    seed: int,
    grid: tuple,
    kind: str,
    shift: bool,
    ratio: float,
    dtype: torch.dtype,
    scale: float,
    how: str,
    channels: int,
    text: int,
) -> None:
    config = PlanSettings(regions=kind, region_size=4, scale=scale, unmerge=how)
    tokens = math.prod(grid)
    plan = toma.plan(features(seed, 2, tokens, 12).to(dtype), grid, ratio, config, shifted=shift)
    sequence = features(seed + 1, 2, text + tokens, channels + text).to(dtype)
    x = sequence[:, text:, text:]  # as it is behind text, in the middle of memory
    exact = exactly(plan)

    merged = merge(plan, x)
    assert_close(merged, exact.merge(x.float()), dtype)

    # by such factors the change is no longer than its dtype, so that nothing is rounded on the way
    y = merged * torch.tensor([-1, 0, 0.5, 2], dtype=dtype)[features(seed + 2, *merged.shape).long() % 4]
    assert_close(unmerge(plan, y), exact.unmerge(y.float()), dtype)

    expected = exact.unmerge(y.float(), x.float(), merged.float())
    assert_close(unmerge(plan, y, x, merged), expected, dtype)


def test_regions_of_more_than_a_block_are_merged_as_well() -> None:
    plan = toma.plan(features(0, 1, 153, 8), (9, 17), 0.3, PlanSettings(region_size=9))
    assert plan.slots.size > 32 and plan.regions.real is not None
    x = features(1, 1, 153, 70)
    merged = merge(plan, x)
    assert_close(merged, plan.merge(x), torch.float32)
    expected = plan.unmerge(2 * merged, x, merged)
    assert_close(unmerge(plan, 2 * merged, x, merged), expected, torch.float32)


# -- what is tried before kernels are used -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels_that_do_what_core_does_pass_the_probe(dtype: torch.dtype) -> None:
    assert probe.difference(DEVICE, dtype) is None


@pytest.mark.parametrize(
    ("places", "slots"), [(16, 16), (32, 32), (64, 16), (64, 32), (64, 64), (128, 128), (256, 16), (256, 128)]
)
def test_the_probe_tries_the_program_of_the_region(places: int, slots: int) -> None:
    """With ragged regions, and without filling the blocks."""
    grid, kind, size, ratio = probe.example(places, slots)
    regions = partition(grid, kind, size, False, DEVICE)
    assert places // 2 < regions.size < places == kernels.block(regions.size)
    assert regions.real is not None
    layout = slot_layout(regions.lengths, ratio, DEVICE)
    assert layout.size < slots == kernels.block(layout.size)
    assert layout.real is not None


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing was probed or launched yet, and nothing of a test stays."""
    kernels.works.cache_clear(), repeats_of.cache_clear()
    yield
    kernels.works.cache_clear(), repeats_of.cache_clear()


def programs(monkeypatch: pytest.MonkeyPatch, fails: Callable[[dict[str, Any]], bool]) -> set[tuple]:
    """The kernels that are launched from now on, with whatever makes them other programs; some fail."""
    run, launched = Launch.run, set()

    def note(launch: Launch) -> Any:
        sizes = {name: value for name, value in launch.arguments.items() if name.isupper()}
        if fails(sizes):
            raise RuntimeError("out of resource: shared memory")
        launched.add((launch.kernel.__name__, *sizes.items()))
        return run(launch)

    monkeypatch.setattr(Launch, "run", note)
    return launched


def test_kernels_that_fail_at_one_size_of_regions_are_used_at_others(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(monkeypatch, lambda sizes: sizes.get("PLACES") == 32)
    assert kernels.works(DEVICE, torch.float32, 16, 16, True)
    with pytest.warns(UserWarning, match="can't run.*out of resource.*up to 32 tokens .* up to 16 does"):
        assert not kernels.works(DEVICE, torch.float32, 32, 16, True)


PLANNED = [
    *[({"unmerge": "regression"}, ratio, 8) for ratio in (0.25, 0.5, 0.8)],
    ({"unmerge": "transpose"}, 0.25, 8),
    ({"unmerge": "pinv"}, 0.5, 8),
    ({"assign": "global"}, 0.5, 4),
]


def planned(settings: dict[str, str], ratio: float, size: int) -> core.MergePlan:
    """On a device that has kernels, in tiles that are not ragged. In this plan, tokens are merged, too."""
    x = features(0, 1, 128, 64)
    plan = toma.plan(x, (8, 16), ratio, PlanSettings(region_size=size, **settings))
    merged = plan.merge(x)
    plan.unmerge(merged)
    plan.unmerge(merged, x, merged)
    return plan


@pytest.fixture
def probed(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are used where the probe says that they work, as on CUDA."""
    monkeypatch.setenv("TOMADIFF_KERNELS", "auto")
    monkeypatch.setattr(Tensor, "is_cuda", True)


@pytest.mark.parametrize(("settings", "ratio", "size"), PLANNED, ids=str)
def test_every_program_that_runs_was_probed(
    settings: dict[str, str], ratio: float, size: int, probed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[set[tuple]] = []
    launched = programs(monkeypatch, lambda sizes: False)
    works = kernels.works

    def note(*program: Any) -> bool:
        works(*program)
        known.append(set(launched))
        return works(*program)

    monkeypatch.setattr(kernels, "works", note)
    assert isinstance(planned(settings, ratio, size), Fused)
    assert known and launched == known[-1]


def test_tokens_in_another_dtype_are_merged_by_kernels_that_work_in_it(
    probed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under autocast, normalised tokens are in fp32, and so are plans at first; tokens may be in fp16."""
    monkeypatch.setattr(kernels, "works", lambda device, dtype, *program: dtype != torch.float16)
    plan = toma.plan(features(0, 1, 32, 16), (4, 8), 0.5, PlanSettings(region_size=4))
    assert isinstance(plan, Fused) and plan.cast(torch.float32) is plan
    assert isinstance(plan.cast(torch.bfloat16), Fused)
    for dtype in (torch.float16, torch.float64):
        cast = plan.cast(dtype)
        assert isinstance(cast, Plan) and cast.merging.dtype == dtype


@pytest.mark.parametrize(("slots", "regression"), [(64, True), (32, False)])
def test_a_plan_whose_program_fails_is_made_by_core(
    slots: int, regression: bool, probed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And told once. Other plans are not concerned."""
    fails = {"PLACES": 64, "SLOTS": slots, "REGRESSION": regression}
    programs(monkeypatch, lambda sizes: sizes == fails)
    settings = {"unmerge": "regression" if regression else "transpose"}
    with warnings.catch_warnings(record=True) as told:
        for kept, ratio in 2 * ((32, 0.5), (64, 0.25)):
            assert isinstance(planned(settings, ratio, 8), Plan if kept == slots else Fused)
    assert [f"up to 64 tokens of a region into up to {slots}" in str(one.message) for one in told] == [True]


class Strict(TorchFunctionMode):
    """As on CUDA: a generator and what it draws must be on one device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn_by, tensors = kwargs.get("generator"), [x for x in args if isinstance(x, Tensor)]
        if drawn_by is not None and not tensors:
            assert torch.device(kwargs.get("device") or torch.get_default_device()) == drawn_by.device
        return func(*args, **kwargs)


def test_the_probe_minds_no_default_device() -> None:
    """With one that holds no values."""
    partition.cache_clear(), slot_layout.cache_clear()
    with torch.device("meta"), Strict():
        assert probe.difference(DEVICE, torch.float32) is None


def test_the_probe_minds_no_autocast() -> None:
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert probe.difference(DEVICE, torch.float32) is None


class TensorCores(TorchDispatchMode):
    """As on CUDA: where TF32 is switched on, products are of inputs with 10 bits after the point."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in PRODUCTS and torch.backends.cuda.matmul.fp32_precision == "tf32":
            args = tree_map_only(Tensor, _rounded, args)
        return func(*args, **(kwargs or {}))


PRODUCTS = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)


def _rounded(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        return x
    bits = x.contiguous().view(torch.int32)
    return ((bits + (1 << 12)) >> 13 << 13).view(torch.float32)


@pytest.fixture
def tf32() -> Iterator[None]:
    """Switched on, as users do."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with TensorCores():
        yield
    torch.backends.cuda.matmul.fp32_precision = "none"


def test_the_probe_minds_no_tf32(tf32: None) -> None:
    """By which core's results would be worse than the kernels', and differ from them."""
    x = features(0, 1, 8, 8)
    assert (torch.bmm(x, x) - torch.bmm(x.double(), x.double())).abs().max() > 1e-4
    assert probe.difference(DEVICE, torch.float32) is None


@pytest.mark.parametrize("places", [16, 64])
def test_weights_of_rounded_features_fail_the_probe(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel would make them whose products are in TF32."""
    monkeypatch.setattr(probe, "weights", lambda x, *given: weights(_rounded(unit_vectors(x)), *given))
    told = probe.difference(DEVICE, torch.float32, *probe.example(places, places))
    assert told == "weigh tokens otherwise than core"


@pytest.mark.parametrize(
    ("kernel", "wrong", "told"),
    [
        ("destinations", lambda x, regions, slots: slots.pack(regions.tokens_at(_first(x, slots))), "worse"),
        ("destinations", lambda x, regions, slots: torch.full((2, slots.kept), -1), "there are not"),
        ("weights", lambda *given: tuple(1.1 * matrix for matrix in weights(*given)), "weigh"),
        ("merge", lambda plan, x, repeats: 1.1 * merge(plan, x), "merge otherwise"),
        (
            "unmerge",
            lambda plan, y, *given, **more: unmerge(plan, 1.1 * y, *given, **more),
            "unmerge otherwise",
        ),
        ("unmerge", lambda *given, **more: _wrong_for_values(*given, **more), "unmerge values otherwise"),
    ],
)
def test_kernels_that_do_something_else_are_told_and_done_without(
    kernel: str, wrong: Any, told: str, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, kernel, wrong)
    with pytest.warns(UserWarning, match=f"float32 on {DEVICE} {told}|float32 on {DEVICE} choose .*{told}"):
        assert not kernels.works(DEVICE, torch.float32, 64, 32, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_probe_runs_kernels_in_its_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = Launch.run, set()

    def note(launch: Launch) -> Any:
        read = launch.arguments.get("features", launch.arguments.get("x"))
        seen.add((launch.kernel, read.dtype))
        return run(launch)

    monkeypatch.setattr(Launch, "run", note)
    probe.difference(DEVICE, dtype, *probe.example(16, 16))
    assert seen == {(kernel, dtype) for kernel in (select._destinations, weigh._weights, mix)}


def _wrong_for_values(plan: Plan, y: Tensor, onto: Tensor | None = None, *given: Any, **more: Any) -> Tensor:
    """Right for changes, which are added to tokens."""
    return (1.1 if onto is None else 1.0) * unmerge(plan, y, onto, *given, **more)


def _first(x: Tensor, slots: core.Slots) -> Tensor:
    return torch.arange(slots.size).expand(len(x) * slots.regions, -1)


# -- plans -------------------------------------------------------------------------------------------------


def fused(x: Tensor, grid: tuple[int, ...]) -> tuple[Plan, Fused]:
    plan = toma.plan(x, grid, 0.5, PlanSettings(region_size=4))
    return plan, Fused(plan)


def test_a_fused_plan_is_used_as_any_other() -> None:
    """As two blocks use one."""
    x = features(0, 2, 63, 8)

    def run(plan: core.MergePlan) -> Tensor:
        tokens = x
        for _ in range(2):
            merged = plan.merge(tokens)
            tokens = plan.unmerge(merged.tanh(), tokens, merged)
        return tokens

    plain, twin = fused(x, (7, 9))
    torch.testing.assert_close(run(twin), run(plain))
    assert torch.equal(twin.destinations, plain.destinations)
    assert torch.equal(twin.owners(), plain.owners())
    assert torch.equal(twin.log_sizes(), plain.log_sizes())


def test_gradients_go_through_a_fused_plan() -> None:
    x = features(0, 1, 63, 8)
    plain, twin = fused(x, (7, 9))
    whole = x.clone().requires_grad_()
    twin.unmerge(2 * twin.merge(whole), whole, twin.merge(whole)).square().sum().backward()
    again = x.clone().requires_grad_()
    plain.unmerge(2 * plain.merge(again), again, plain.merge(again)).square().sum().backward()
    torch.testing.assert_close(whole.grad, again.grad)


def made(name: str) -> DiffusionPipeline:
    """With the same weights on every device."""
    with torch.device("cpu"):
        return make(name).to(DEVICE)


def drawn(pipe: DiffusionPipeline, **more: Any) -> Tensor:
    """From the same noise and text on every device."""
    with torch.device("cpu"):
        embeds, pooled = (x.to(DEVICE) for x in text(0))
        given = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, "guidance": 1.0}
        return draw(pipe, **given, **more)


def test_pipelines_are_made_and_draw_under_any_default_device() -> None:
    expected = drawn(made("flux"), steps=1)
    with torch.device("meta"), Strict():
        assert torch.equal(drawn(made("flux"), steps=1), expected)


@pytest.mark.parametrize("where", ["span", "module"])
@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_pipelines_draw_the_same_with_kernels(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole generation, on ragged grids."""
    pictures = []
    for used in "01":
        monkeypatch.setenv("TOMADIFF_KERNELS", used)
        pipe = tomadiff.apply(made(name), ratio=0.5, where=where, region_size=3)
        denoiser(pipe)._tomadiff.keeps_plans = True
        pictures.append(drawn(pipe, steps=2, size=(80, 64)))
        plans = denoiser(pipe)._tomadiff.plans.values()
        assert {isinstance(kept.plan, Fused) for kept in plans} == {used == "1"}
    torch.testing.assert_close(*pictures, atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="tomadiff selftest compiles with kernels on a GPU")
def test_compiled_models_draw_the_same_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sana's modules aren't residual, so that nothing is added to what kernels return."""
    monkeypatch.setenv("TOMADIFF_KERNELS", "1")
    operators.test_operators_return_what_their_fake_kernels_promise("sana", {})
    torch.compiler.reset()
    operators.test_what_operators_returned_may_be_written_over("sana", {})
    torch.compiler.reset()


class Interpreted:
    """In the place of a compiled kernel, which the interpreter doesn't make."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *values: self.launch.kernel[grid](*values, **self.launch.options)


def test_launches_are_repeated_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though by default there is a new plan in every step, of which `cast` makes another."""
    run, launched = Launch.run, []

    def noting(launch: Launch) -> Any:
        launched.append(launch.kernel)
        return run(launch) or Interpreted(launch)

    monkeypatch.setattr(Launch, "run", noting)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    repeats_of.cache_clear()
    pictures = []
    for used in "01":
        monkeypatch.setenv("TOMADIFF_KERNELS", used)
        pipe = tomadiff.apply(made("flux"), ratio=0.5, region_size=3)
        pictures.append(drawn(pipe, steps=8, size=(64, 64)))
    # both kinds of blocks merge and unmerge, behind text and without it
    assert 0 < launched.count(mix) <= 4
    assert 0 < launched.count(select._destinations) <= 2
    assert 0 < launched.count(weigh._weights) <= 2
    torch.testing.assert_close(*pictures, atol=1e-3, rtol=1e-3)
    repeats_of.cache_clear()  # of kernels in the interpreter
