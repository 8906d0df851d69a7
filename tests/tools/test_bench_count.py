"""Counting on the meta device, and what a roofline makes of the counts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelines import bare_call, denoiser, make
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from tomadiff.config import Config
from tomadiff.core import facility_location, partition
from tomadiff.methods import PlanSettings
from tomadiff.models import family_of
from tomadiff.runtime.registration import attach, detach, session_of
from tomadiff.runtime.session import Session
from tomadiff.tools.bench import kernel_counts, models
from tomadiff.tools.bench.count import _KNOWN, Counter, Counts, Cycle, Op, count, patch_for_counting
from tomadiff.tools.bench.expect import Generation
from tomadiff.tools.bench.roofline import DEVICES, Device, cpu_device, fused, seconds, whole_waves


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ops(run: Callable[[], Any]) -> list[Op]:
    with Counter() as counter, torch.no_grad():
        run()
    return counter.ops


@functools.cache
def skeleton(name: str) -> tuple[nn.Module, Callable[[int], Any]]:
    """A tiny model on the meta device, and a function that calls it at a step."""
    model = denoiser(make(name))
    with torch.device("meta"):
        twin = type(model).from_config(model.config).eval()
    call = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), bare_call(model))
    table = meta(50)
    return twin, lambda step: twin(**{**call, "timestep": table[step].expand(1)})


def patched(model: nn.Module, kernels: bool = False, **settings: Any) -> Session:
    family = family_of(model)
    grid = (16, 16) if family.name == "unet" else (8, 8)
    return patch_for_counting(model, family, Config(**settings), grid, kernels)


@functools.cache
def counted(name: str = "sdxl", **settings: Any) -> Cycle:
    model, call = skeleton(name)
    if settings.get("method") not in ("tome", "tofu"):  # which have no regions
        settings["region_size"] = 4
    return count(call, patched(model, **settings))


@functools.cache
def dense(name: str = "sdxl") -> Cycle:
    return count(skeleton(name)[1])


# What counts


@pytest.mark.parametrize(
    ("run", "flops"),
    [
        (lambda: F.linear(meta(2, 5, 16), meta(32, 16), meta(32)), 2 * 2 * 5 * 16 * 32),
        (lambda: torch.bmm(meta(3, 4, 5), meta(3, 5, 6)), 2 * 3 * 4 * 5 * 6),
        (lambda: torch.baddbmm(meta(3, 4, 6), meta(3, 4, 5), meta(3, 5, 6)), 2 * 3 * 4 * 5 * 6),
        (lambda: F.conv2d(meta(2, 3, 8, 8), meta(4, 3, 3, 3), padding=1), 2 * 2 * 8 * 8 * 3 * 4 * 3 * 3),
        (lambda: F.scaled_dot_product_attention(*[meta(2, 3, 7, 16)] * 3), 4 * 2 * 3 * 7 * 7 * 16),
        (lambda: meta(2, 3) + 1, 0),
    ],
    ids=["linear", "bmm", "baddbmm", "convolution", "attention", "addition"],
)
def test_flops_are_two_for_each_multiply_add(run: Callable[[], Tensor], flops: int) -> None:
    assert [op.flops for op in ops(run)] == [flops]


def test_flops_agree_with_the_counter_of_pytorch() -> None:
    with FlopCounterMode(display=False) as reference, torch.no_grad():
        skeleton("sdxl")[1](0)
    assert dense().per_step.total.flops == reference.get_total_flops() > 0


def test_views_and_allocations_are_no_launches() -> None:
    def run() -> None:
        x = meta(4, 6)
        _ = x.T, x[1:], x.reshape(2, 12), x.expand(3, 4, 6), x.detach(), x.chunk(2), x.to(torch.float32)
        _ = torch.empty_like(x), x.new_empty(3), torch.empty(5, device="meta"), x.contiguous()
        _ = x @ meta(6, 2)

    assert [op.name for op in ops(run)] == ["mm"]


def test_attention_is_one_launch_that_moves_its_arguments_and_its_result() -> None:
    q, k, v, mask = meta(2, 3, 7, 16), meta(2, 3, 9, 16), meta(2, 3, 9, 8), meta(2, 1, 1, 9)
    (op,) = ops(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    assert op.bytes == 4 * (q.numel() + k.numel() + v.numel() + mask.numel() + 2 * 3 * 7 * 8)
    with Counter():
        assert F.scaled_dot_product_attention(q, k, v).shape == (2, 3, 7, 8)


def test_rms_norm_is_one_launch() -> None:
    (op,) = ops(lambda: F.rms_norm(meta(5, 16), (16,), meta(16)))
    assert op.bytes == 4 * (5 * 16 + 16 + 5 * 16)


@pytest.mark.parametrize(
    ("run", "moved"),
    [
        (lambda: meta(8, 4) * meta(8, 4), 3 * 32),
        (lambda: meta(8, 4) * meta(1, 4).expand(8, 4), 32 + 4 + 32),
        (lambda: meta(8, 4).mul_(meta(8, 4)), 3 * 32),
        (lambda: torch.mul(meta(8, 4), 2, out=meta(8, 4)), 2 * 32),
        (lambda: meta(8, 4).copy_(meta(8, 4)), 2 * 32),
        (lambda: meta(8, 4).zero_(), 32),
        (lambda: meta(8, 4).index_select(0, meta(2, dtype=torch.int32)), 2 + 8 + 8),
        (lambda: meta(8, 4).scatter_(0, meta(2, 4, dtype=torch.int64), meta(2, 4)), 16 + 8 + 8),
    ],
    ids=["two in, one out", "expanded", "in place", "out", "copy", "fill", "pick", "scatter"],
)
def test_every_tensor_is_moved_once_as_far_as_it_is_touched(run: Callable[[], Tensor], moved: int) -> None:
    assert [op.bytes for op in ops(run)] == [4 * moved]


def test_bytes_are_of_the_precision_that_is_counted() -> None:
    (half,), (full,) = (ops(lambda t=t: meta(8, 4, dtype=t).exp()) for t in (torch.bfloat16, torch.float32))
    assert (half.bytes * 2, half.dtype, full.dtype) == (full.bytes, torch.bfloat16, torch.float32)


def test_what_the_host_makes_once_for_all_is_not_counted() -> None:
    assert ops(lambda: torch.arange(9).roll(1).to("meta")) == []
    assert len(ops(lambda: meta(9) * torch.tensor(2.0))) == 1  # a number comes along with the launch
    model, call = skeleton("flux")
    once = {"refresh_destinations": 1, "refresh_weights": 1}
    partition.cache_clear()
    assert count(call, patched(model, **once)) == count(call, patched(model, **once))


def test_facility_location_launches_five_kernels_a_pick() -> None:
    few, more = (len(ops(lambda k=k: facility_location(meta(6, 16, 16), k))) for k in (4, 9))
    assert more - few == 5 * (9 - 4)
    assert few - 5 * 4 < 10  # and little besides


# What merging adds and saves


@pytest.mark.parametrize("method", ["toma", "tome", "tofu", "todo", "ideal"])
def test_every_method_can_be_counted_in_every_family(name: str, method: str) -> None:
    model, call = skeleton(name)
    merged = count(call, patched(model, method=method, refresh_destinations=1, refresh_weights=1))
    assert merged.per_step.model.flops < dense(name).per_step.model.flops


def test_phases_are_told_apart() -> None:
    planning = counted().planning
    assert {op.phase for op in planning.ops} == {"model", "plan", "merge", "unmerge"}
    parts = [planning.of(phase) for phase in ("plan", "merge", "unmerge")]
    assert planning.overhead == tuple(map(sum, zip(*parts)))
    assert planning.total == tuple(map(sum, zip(planning.model, planning.overhead)))
    assert {op.name for op in planning.ops if op.phase == "merge"} <= {"bmm", "index_select"}


def test_a_dense_model_has_no_overhead() -> None:
    assert dense().per_step.overhead == (0, 0, 0)
    assert dense().planning is dense().reusing and dense().refreshing is None


@pytest.mark.parametrize("method", ["toma", "tome", "tofu", "ideal"])
def test_merging_saves_flops_of_the_model_and_none_of_its_launches(method: str) -> None:
    merged, whole = counted(ratio=0.5, method=method).per_step.model, dense().per_step.model
    assert merged.flops < 0.98 * whole.flops  # most of this tiny model is convolutions
    assert merged.launches == whole.launches


def test_reused_plans_cost_merging_and_unmerging_alone() -> None:
    cycle = counted(refresh_destinations=4, refresh_weights=2)
    assert cycle.reusing.of("plan") == (0, 0, 0)
    assert cycle.reusing.of("merge", "unmerge") == cycle.planning.of("merge", "unmerge")
    assert 0 < cycle.refreshing.of("plan").launches < cycle.planning.of("plan").launches


def test_a_step_costs_the_average_over_the_schedule() -> None:
    cycle = counted(refresh_destinations=10, refresh_weights=5)
    plan, weights = (step.of("plan").launches for step in (cycle.planning, cycle.refreshing))
    assert len(cycle.steps) == 10 and cycle.steps.index(cycle.refreshing) == 5
    assert cycle.per_step.of("plan").launches == (plan + weights) / 10
    assert cycle.per_step.of("merge") == cycle.planning.of("merge")


@pytest.mark.parametrize(("refreshes", "shift"), [((4, 2), False), ((3, 1), True), ((1, 1), True)])
def test_steps_left_out_are_as_if_they_had_run(refreshes: tuple[int, int], shift: bool) -> None:
    model, call = skeleton("flux")
    settings = {"refresh_destinations": refreshes[0], "refresh_weights": refreshes[1], "shift": shift}
    cycle = count(call, patched(model, **settings))
    patch = patched(model, **settings)
    attach(patch)
    for step in range(len(cycle.steps) + 2):  # then everything repeats itself
        with Counter(lambda: patch.times.phase) as counter, torch.no_grad():
            call(step)
        assert Counts(counter.ops) == cycle.steps[step % len(cycle.steps)]
    detach(patch)


def test_operations_that_are_known_already_are_counted_alike() -> None:
    model, call = skeleton("sd1")
    settings = {"refresh_destinations": 1, "refresh_weights": 1}
    known = [count(call, patched(model, **settings)) for _ in range(2)][1]
    _KNOWN.clear()
    assert count(call, patched(model, **settings)) == known
    assert _KNOWN


@pytest.mark.parametrize("unmerge", ["regression", "transpose"])
def test_kernels_are_counted_as_they_are_launched(unmerge: str) -> None:
    """tests/kernels/test_kernels.py has the launches themselves."""
    own = {"refresh_destinations": 2, "refresh_weights": 1, "unmerge": unmerge}
    core, kernels = counted("flux", **own), counted("flux", kernels=True, **own)
    for step, names in ((kernels.planning, {"destinations", "weights"}), (kernels.steps[1], {"weights"})):
        planned = {op.name for op in step.ops if op.phase == "plan"}
        assert planned & {"destinations", "weights"} == names
        assert not planned & {"bmm", "baddbmm", "softmax", "argmax"}, "core does nothing of it"
    spans = [op.name for op in core.planning.ops if op.phase == "merge"].count("bmm")
    for phase in ("merge", "unmerge"):
        ours = [op for op in kernels.planning.ops if op.phase == phase and op.name == "mix"]
        assert len(ours) == spans
        assert sum(op.flops for op in ours) == core.planning.of(phase).flops
    assert kernels.per_step.model == core.per_step.model


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"unmerge": "pinv"}, ["destinations", "mix"]),
        ({"assign": "global"}, ["destinations", "mix"]),  # 64 tokens
        ({"method": "tome"}, []),
        ({"method": "ideal"}, []),
    ],
    ids=str,
)
def test_only_what_kernels_do_is_counted_as_theirs(settings: dict[str, Any], names: list[str]) -> None:
    step = counted("flux", kernels=True, **settings).planning
    assert sorted({op.name for op in step.ops} & {"destinations", "weights", "mix"}) == names


@pytest.mark.parametrize("unmerge", ["regression", "transpose"])
def test_weights_read_features_twice_and_regression_needs_memory(unmerge: str) -> None:
    x, settings = meta(1, 128, 20), PlanSettings(unmerge=unmerge)
    choose, weigh = ops(lambda: kernel_counts.plan(x, (8, 16), 0.75, settings))
    assert (choose.name, weigh.name) == ("destinations", "weights")
    features, destinations, matrix = 4 * 128 * 20, 8 * 2 * 16, 4 * 2 * 16 * 64
    assert choose.bytes == features + destinations
    scratch = 4 * 2 * (64 + 2 * 16) * 64 if unmerge == "regression" else 0
    assert weigh.bytes == 2 * features + destinations + 3 * matrix + 2 * scratch


def test_regions_too_large_for_kernels_are_counted_as_cores() -> None:
    x, settings = meta(1, 1024, 8), PlanSettings(regions="global")
    names = {op.name for op in ops(lambda: kernel_counts.plan(x, (32, 32), 0.5, settings).merge(x))}
    assert "bmm" in names and not names & {"destinations", "weights", "mix"}


def test_steps_that_do_not_run_are_left_out() -> None:
    assert counted("flux", ratio=0.5, interval=2) == counted("flux")


def test_the_patch_comes_off_again_even_after_an_error() -> None:
    model, call = skeleton("flux")
    patch = patched(model)
    assert count(call, patch).per_step.hooks == len(patch.sites) > 0
    assert count(call) == dense("flux")
    with pytest.raises(ZeroDivisionError):
        count(lambda step: call(step // 0), patched(model))
    assert session_of(model) is None


# What a roofline makes of it

GPU = Device(
    "test", tflops=100, tflops_fp32=10, bandwidth=1000, multiprocessors=10, launch_us=10, kernel_us=2
)


def calls(*ops: Op, calls: int = 1) -> Counts:
    return Counts(ops, calls)


def product(flops: int = 0, moved: int = 0, name: str = "mm", dtype: torch.dtype = torch.float16) -> Op:
    return Op(name, "model", flops, moved, dtype)


def test_small_kernels_cost_their_launches() -> None:
    assert seconds(calls(*[product(1, 1)] * 50), GPU) == pytest.approx(50 * 10e-6)
    graph = dataclasses.replace(GPU, launch_us=0)
    assert seconds(calls(*[product(1, 1)] * 50), graph) == pytest.approx(50 * 2e-6)


def test_rounds_inside_a_kernel_wait_for_each_other() -> None:
    looping = product(10**12)._replace(rounds=40)
    assert seconds(calls(looping), GPU) == pytest.approx(1 / (100 * GPU.matmul) + 40 * GPU.round_us * 1e-6)


def test_large_kernels_cost_their_arithmetic_or_their_traffic() -> None:
    assert seconds(calls(product(10**12)), GPU) == pytest.approx(1 / (100 * GPU.matmul))
    assert seconds(calls(product(10**12, name="attention")), GPU) == pytest.approx(1 / (100 * GPU.attention))
    assert seconds(calls(product(10**12, dtype=torch.float32)), GPU) == pytest.approx(1 / (10 * GPU.matmul))
    assert seconds(calls(product(1, 10**12)), GPU) == pytest.approx(1 / GPU.memory)


def test_launches_hide_behind_large_kernels() -> None:
    large, small = product(10**12), product(1, 1)
    assert seconds(calls(large, small), GPU) == pytest.approx(1 / (100 * GPU.matmul) + 2e-6)


def test_more_work_never_takes_less_time() -> None:
    base = calls(*[product(10**9, 10**7)] * 20)
    for op in (product(10**10, 10**7), product(10**9, 10**9)):
        assert seconds(calls(*base.ops[:-1], op), GPU) > seconds(base, GPU)
    assert seconds(calls(*base.ops, product()), GPU) > seconds(base, GPU)


def test_seconds_are_per_call() -> None:
    op = product(10**12)
    assert seconds(calls(op, op, calls=2), GPU) == pytest.approx(seconds(calls(op), GPU))


@pytest.mark.parametrize(
    ("run", "product"),
    [
        (lambda: F.linear(meta(2, 5, 16), meta(32, 16), meta(32)), (1, 10, 32)),
        (lambda: torch.bmm(meta(3, 4, 5), meta(3, 5, 6)), (3, 4, 6)),
        (lambda: F.conv2d(meta(2, 3, 8, 8), meta(4, 3, 3, 3), padding=1), (1, 2 * 8 * 8, 4)),
        (lambda: F.scaled_dot_product_attention(*[meta(2, 3, 7, 16)] * 3), (2 * 3, 7, 16)),
        (lambda: meta(2, 3) + 1, None),
    ],
    ids=["linear", "bmm", "convolution", "attention", "addition"],
)
def test_products_have_a_batch_rows_and_columns(run: Callable[[], Tensor], product: Any) -> None:
    assert [op.product for op in ops(run)] == [product]


@pytest.mark.parametrize(
    ("product", "factor"),
    [
        ((1, 2560, 128), 1.0),  # ten of the largest tiles, one for each multiprocessor
        ((1, 1281, 128), 5 * 10 * 64 * 64 / (1281 * 128 * 0.7)),  # where small tiles waste less
        ((10, 64, 64), 1 / 0.7),
        ((1, 64, 64), 10 / 0.7),  # one multiprocessor works, nine wait
    ],
)
def test_a_wave_that_is_not_full_takes_as_long_as_one_that_is(
    product: tuple[int, int, int], factor: float
) -> None:
    op = Op("mm", "model", 1, 1, torch.float16, product)
    assert whole_waves(op, 10) == pytest.approx(factor)


def test_half_a_wave_of_tiles_is_expected_to_take_as_long_as_a_full_one() -> None:
    half, full = (
        product(10**12)._replace(product=(5, 64, 64)),
        product(2 * 10**12)._replace(product=(10, 64, 64)),
    )
    assert seconds(calls(half), GPU) == pytest.approx(seconds(calls(full), GPU))


def test_attention_is_cut_along_its_queries_alone() -> None:
    op = Op("attention", "model", 1, 1, torch.float16, (5, 256, 64))
    assert whole_waves(op, 10) == 1
    assert whole_waves(op._replace(product=(5, 257, 64)), 10) == pytest.approx(2 * 256 / 257)


def test_compiled_code_fuses_what_is_between_products_but_not_our_operators() -> None:
    small, large, matmul = product(0, 10), product(0, 30), product(5)
    ours = small._replace(phase="merge")
    assert fused([small, large, matmul, small, small, ours, ours]) == [large, matmul, small, ours, ours]
    counts = calls(*[small] * 9, *[ours] * 3)
    assert seconds(counts, GPU) == pytest.approx(12 * 10e-6)
    assert seconds(counts, GPU, compiled=True) == pytest.approx(3 * 10e-6 + 2e-6)


def test_hooks_take_time_of_the_host_unless_compiled() -> None:
    hooked = Counts([product(1, 1)], hooks=4)
    assert seconds(hooked, GPU) == pytest.approx(10e-6 + 4 * GPU.hook_us * 1e-6)
    assert seconds(hooked, GPU, compiled=True) == pytest.approx(2e-6)
    assert Cycle([hooked, hooked], hooks=4).per_step.hooks == 4
    assert seconds(Cycle([hooked, hooked], hooks=4).per_step, GPU) == pytest.approx(seconds(hooked, GPU))


def test_a_generation_is_the_steps_that_run_and_a_little_for_those_that_do_not() -> None:
    step = calls(product(10**12))
    whole, half = Generation(step, 10), Generation(step, 5, 5)
    assert whole.seconds(GPU, False) == pytest.approx(10 * seconds(step, GPU))
    assert half.seconds(GPU, False) == pytest.approx(5 * seconds(step, GPU) + 5 * GPU.forecast_us * 1e-6)


def test_guesses_are_on_both_sides() -> None:
    slow, fast = GPU.bounds()
    heavy, many = calls(product(10**12)), calls(*[product(1, 1)] * 50)
    assert seconds(heavy, fast) < seconds(heavy, GPU) < seconds(heavy, slow)
    assert seconds(many, slow) < seconds(many, GPU) < seconds(many, fast)


def test_this_cpu_can_be_put_in() -> None:
    cpu = cpu_device()
    assert seconds(calls(product(10**9, dtype=torch.float32)), cpu) == pytest.approx(1e-3 / cpu.tflops)
    assert cpu.bandwidth > 0 and cpu.attention > 0 and cpu.launch_us == 0


# Seconds of a dense call in bf16. Of diffusers' benchmarks (huggingface.co/datasets/diffusers/benchmarks; "an
# L40", which must be an L40S to be so fast), and of its guide to fast SDXL: 3.31 s for 30 steps with guidance
# on an A100, text encoders and decoder included.
PUBLISHED = {("sdxl", 1, "l40s"): 0.071, ("sdxl", 2, "a100"): 3.31 / 30, ("flux-dev", 1, "l40s"): 0.53}


@pytest.mark.parametrize(("name", "batch", "device"), PUBLISHED)
def test_published_times_are_met_within_a_third(name: str, batch: int, device: str) -> None:
    model = models.skeleton_of(name, dtype=torch.bfloat16)
    half = {"dtype": torch.bfloat16, "device": "meta"}
    call: dict[str, Any] = {"timestep": torch.empty(batch, **half)}
    if name == "sdxl":
        call |= {
            "sample": torch.empty(batch, 4, 128, 128, **half),
            "encoder_hidden_states": torch.empty(batch, 77, 2048, **half),
            "added_cond_kwargs": {
                "text_embeds": torch.empty(batch, 1280, **half),
                "time_ids": torch.empty(batch, 6, **half),
            },
        }
    else:
        call |= {
            "hidden_states": torch.empty(batch, 4096, 64, **half),
            "encoder_hidden_states": torch.empty(batch, 512, 4096, **half),
            "pooled_projections": torch.empty(batch, 768, **half),
            "img_ids": torch.empty(4096, 3, **half),
            "txt_ids": torch.empty(512, 3, **half),
            "guidance": torch.empty(batch, **half),
        }
    counts = count(lambda step: model(**call)).per_step
    tflops = {"sdxl": 6.761, "flux-dev": 74.385}[
        name
    ]  # 50 steps of the latter are the 3719.5 of the literature
    assert counts.total.flops / 1e12 == pytest.approx(tflops * batch, rel=1e-3)
    ratio = seconds(counts, DEVICES[device]) / PUBLISHED[name, batch, device]
    assert 2 / 3 < ratio < 3 / 2
