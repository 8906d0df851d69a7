"""What the library promises, for every family, through the pipelines' real calls."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from comparison import alike, mostly_alike, state
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    FirstBlockCacheConfig,
    HeunDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    StableDiffusionImg2ImgPipeline,
    TaylorSeerCacheConfig,
    UniPCMultistepScheduler,
)
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention import FeedForward
from pipelines import bare_call, denoiser, draw, every_pipeline_with, make, text
from torch import Tensor, nn

import tomadiff
from tomadiff.core import RefreshSchedule
from tomadiff.runtime.hook import Span
from tomadiff.runtime.layout import Layout
from tomadiff.runtime.model_call import DENSE, ModelCall
from tomadiff.runtime.plan_cache import PlanCache

PLACES = [{"where": "block"}, {"where": "module"}, {"where": "span"}]
FORECAST = {"interval": 2}
METHODS = [{"where": "kv"}, {"method": "tome"}, {"method": "tofu"}, {"method": "todo"}]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# -- on and off --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [*PLACES, *METHODS], ids=str)
def test_remove_is_bit_exact(pipe: DiffusionPipeline, settings: dict[str, Any]) -> None:
    before, attributes = draw(pipe), state(denoiser(pipe))
    tomadiff.apply(pipe, **settings)
    assert distance(draw(pipe), before) > 1e-3, "merging must change the picture, or nothing is tested"
    tomadiff.remove(pipe)
    assert torch.equal(draw(pipe), before)
    assert state(denoiser(pipe)) == attributes, "nothing is left on any module"


@pytest.mark.parametrize("settings", [*PLACES, *METHODS], ids=str)
def test_ratio_zero_equals_the_unpatched_model(pipe: DiffusionPipeline, settings: dict[str, Any]) -> None:
    before = draw(pipe)
    tomadiff.apply(pipe, ratio=0, **settings)
    torch.testing.assert_close(draw(pipe), before)


def test_applying_again_replaces(pipe: DiffusionPipeline) -> None:
    once = draw(tomadiff.apply(pipe, ratio=0.5))
    tomadiff.apply(pipe, ratio=0.25)
    assert torch.equal(draw(tomadiff.apply(pipe, ratio=0.5)), once)
    tomadiff.apply(pipe, where="module")
    tomadiff.remove(pipe)
    assert not hasattr(denoiser(pipe), "_tomadiff")


def test_merged_ends_with_the_block_also_after_an_exception(pipe: DiffusionPipeline) -> None:
    before = draw(pipe)
    with pytest.raises(ZeroDivisionError), tomadiff.merged(pipe, ratio=0.5):
        assert distance(draw(pipe), before) > 1e-3
        raise ZeroDivisionError
    assert torch.equal(draw(pipe), before)


def test_merged_restores_what_was_applied_before() -> None:
    pipe = tomadiff.apply(make("sd1"), ratio=0.25)
    before = draw(pipe)
    with tomadiff.merged(pipe, ratio=0.75):
        assert distance(draw(pipe), before) > 1e-3
    assert torch.equal(draw(pipe), before)
    assert tomadiff.report(pipe).settings["ratio"] == 0.25


def test_merged_ends_on_its_models_also_where_the_pipeline_got_others() -> None:
    pipe = make("sd1")
    unet, dense = pipe.unet, draw(pipe)
    quarter = draw(tomadiff.apply(pipe, ratio=0.25))
    with tomadiff.merged(pipe, ratio=0.5):
        pipe.unet = make("sd1").unet
        assert alike(draw(pipe), dense), "the new one is not merged"
    pipe.unet = unet
    assert torch.equal(draw(pipe), quarter)
    assert torch.equal(draw(tomadiff.remove(pipe)), dense)


def test_an_exception_in_the_middle_of_a_step_leaves_the_pipeline_usable(pipe: DiffusionPipeline) -> None:
    tomadiff.apply(pipe, ratio=0.5, where="span")
    good = draw(pipe)
    last = [module for module in denoiser(pipe).modules() if isinstance(module, FeedForward)][-1]
    handle = last.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        draw(pipe)
    handle.remove()
    assert torch.equal(draw(pipe), good)


def test_model_and_pipeline_are_patched_alike(pipe: DiffusionPipeline) -> None:
    through_pipe = draw(tomadiff.apply(pipe, ratio=0.5))
    tomadiff.remove(pipe)
    tomadiff.apply(denoiser(pipe), ratio=0.5)
    assert torch.equal(draw(pipe), through_pipe)


def test_another_instance_of_the_class_is_left_alone(name: str) -> None:
    patched, other = make(name), make(name)
    before, attributes = draw(other), state(denoiser(other))
    tomadiff.apply(patched, ratio=0.5)
    assert torch.equal(draw(other), before)
    assert state(denoiser(other)) == attributes


# -- same seed, same image ---------------------------------------------------------------------------------


def test_same_seed_same_image_run_to_run(pipe: DiffusionPipeline) -> None:
    tomadiff.apply(pipe, ratio=0.5)
    first = draw(pipe)
    draw(pipe, seeds=(5,))  # whatever comes in between
    assert torch.equal(draw(pipe), first)


BATCHED = [*PLACES, *METHODS, FORECAST, {"weigh_keys": True}, {"preset": "toma"}]


@pytest.mark.parametrize(
    ("name", "settings"), every_pipeline_with([*BATCHED, {"where": "kv", "weigh_keys": True}]), ids=str
)
def test_a_sample_does_not_depend_on_its_batch(name: str, settings: dict[str, Any]) -> None:
    pipe = tomadiff.apply(make(name), **settings)
    alone = torch.cat([draw(pipe, seeds=(seed,)) for seed in (0, 1, 2)])
    assert mostly_alike(alone, draw(pipe, seeds=(0, 1, 2)))


# -- tokens ------------------------------------------------------------------------------------------------


@contextmanager
def watched(model: nn.Module, names: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Tokens that reach the last linear layer inside modules of these names, seen by plain torch hooks."""
    seen: dict[str, int] = {}
    handles = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in names and isinstance(module, nn.Linear):
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, name=name: seen.__setitem__(name, args[0].shape[1])
                )
            )
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("settings", PLACES, ids=str)
def test_attention_really_gets_the_reduced_number_of_tokens(
    pipe: DiffusionPipeline, settings: dict[str, Any]
) -> None:
    with watched(denoiser(pipe), ("to_q", "proj_mlp", "proj")) as dense:
        draw(pipe)
    dense = dict(dense)
    tomadiff.apply(pipe, ratio=0.5, dense_blocks=0, **settings)
    with watched(denoiser(pipe), ("to_q", "proj_mlp", "proj")) as merged:
        draw(pipe)
    assert dense.keys() == merged.keys()
    for name, tokens in merged.items():
        if "context" in name:  # the text's own MLP
            assert tokens == dense[name] == 7
        else:
            text_tokens = 7 if "single" in name else 0
            assert tokens - text_tokens == (dense[name] - text_tokens) / 2, name


@pytest.mark.parametrize("size", [(1080, 1920), (832, 1216), (136, 200)], ids=str)
def test_any_size_works_and_keeps_what_the_ratio_says(
    pipe: DiffusionPipeline, name: str, size: tuple[int, int]
) -> None:
    if name in ("sd3", "flux"):  # these take multiples of 16 only
        size = (size[0] // 16 * 16, size[1] // 16 * 16)
    elif name == "sd1" and max(size) > 1000:  # as many tokens as the others: it attends to all its latents
        size = (size[0] // 16 * 8, size[1] // 16 * 8)
    tomadiff.apply(pipe, ratio=0.4)
    assert draw(pipe, size=size, steps=1, guidance=1.0).isfinite().all()
    for site in tomadiff.report(pipe).sites:
        side = 8 * site.level * (2 if name in ("sd3", "flux") else 1)  # pixels of a token
        rows, columns = math.ceil(size[0] / side), math.ceil(size[1] / side)
        assert site.tokens == rows * columns
        regions = math.ceil(rows / 8) * math.ceil(columns / 8)
        assert abs(site.kept - 0.6 * site.tokens) <= regions, "within one token a region"


@pytest.mark.parametrize("settings", METHODS, ids=str)
def test_any_size_works_with_every_method(
    pipe: DiffusionPipeline, name: str, settings: dict[str, Any]
) -> None:
    tomadiff.apply(pipe, **settings)
    assert draw(pipe, size=(9 * 16, 13 * 16), steps=1, guidance=1.0).isfinite().all()
    for site in tomadiff.report(pipe).sites:
        kept = 0.25 if settings.get("method") == "todo" else 0.5
        sides = [math.ceil(9 / (2 * site.level) * 4), math.ceil(13 / (2 * site.level) * 4)]
        if name in ("sd3", "flux"):
            sides = [9, 13]
        assert site.tokens == math.prod(sides)
        assert abs(site.kept - kept * site.tokens) <= max(sides), "up to an edge"


def test_unets_take_latents_that_neither_tiles_nor_levels_divide() -> None:
    for name in ("sd1", "sdxl"):
        pipe = tomadiff.apply(make(name), ratio=0.5, dense_blocks=0)
        assert draw(pipe, size=(13 * 8, 27 * 8)).isfinite().all()
        finest = tomadiff.report(pipe).sites[0]
        assert finest.tokens == {"sd1": 13 * 27, "sdxl": 7 * 14}[name]


# -- one generation after the other ------------------------------------------------------------------------

GENERATIONS: list[dict[str, Any]] = [
    {"size": (128, 128), "steps": 3},
    {"size": (96, 160), "steps": 2},
    {"size": (96, 160), "steps": 2, "seeds": (3, 4)},
    {"size": (128, 128), "steps": 4, "guidance": 1.0},
    {"size": (128, 128), "steps": 1},
    {"size": (128, 128), "steps": 1, "seeds": (7,)},
]


@pytest.mark.parametrize(
    "settings",
    [{}, {"where": "span", "shift": True}, {"share": "block"}, {"where": "kv"}, {"method": "tome"}, FORECAST],
    ids=str,
)
@pytest.mark.parametrize("whole", [True, False], ids=["pipeline", "bare model"])
def test_generations_in_a_row_do_not_disturb_each_other(
    name: str, settings: dict[str, Any], whole: bool
) -> None:
    """Sizes, step counts, batch sizes and guidance change, and each picture is as if it were the first."""
    pipe = make(name)
    target = pipe if whole else denoiser(pipe)
    tomadiff.apply(target, ratio=0.5, **settings)
    images = [draw(pipe, **generation) for generation in GENERATIONS]
    for generation, image in zip(GENERATIONS, images):
        tomadiff.apply(target, ratio=0.5, **settings)
        assert torch.equal(draw(pipe, **generation), image), generation


def test_plans_are_refreshed_on_schedule(pipe: DiffusionPipeline) -> None:
    tomadiff.apply(pipe, ratio=0.5, share="kind", refresh_destinations=4, refresh_weights=2)
    draw(pipe, steps=7, guidance=1.0)
    report = tomadiff.report(pipe)
    plans = len({(site.kind, site.tokens) for site in report.sites})  # steps 0 and 4; steps 2 and 6
    assert report.refreshes == {"destinations": 2 * plans, "weights": 2 * plans}
    assert report.generations == 1 and report.model_calls["run"] == 7


def test_guidance_in_separate_calls_has_plans_of_its_own() -> None:
    """Flux runs prompt and negative prompt one after the other; a plan of one must not serve the other."""
    pipe = make("flux")
    tomadiff.apply(pipe, ratio=0.5)
    draw(pipe, steps=3)
    report = tomadiff.report(pipe)
    assert (
        report.model_calls["run"] == 6 and report.refreshes["destinations"] == 4
    )  # two kinds of block, two calls a step
    # with the same prompt on both sides, guidance must be without effect
    embeds, pooled = text(0)
    same = {"negative_prompt_embeds": embeds, "negative_pooled_prompt_embeds": pooled}
    assert alike(draw(pipe, guidance=5.0, **same), draw(pipe, guidance=1.0))


def test_own_plans_cost_one_for_each_block(pipe: DiffusionPipeline) -> None:
    tomadiff.apply(pipe, ratio=0.5, share="block", where="block")
    draw(pipe, guidance=1.0)
    report = tomadiff.report(pipe)
    assert report.refreshes["destinations"] == len(report.sites)


# -- settings that decide fidelity -------------------------------------------------------------------------


def dense_calls(pipe: DiffusionPipeline) -> set[tuple[int, int]]:
    """Of each site: calls, and of these, dense ones."""
    return {(site.calls, site.dense_calls) for site in tomadiff.report(pipe).sites}


def test_steps_outside_of_ranges_stay_dense(pipe: DiffusionPipeline) -> None:
    for ranges in ([(2, 0.5)], [(0.4, 0.5)]):
        tomadiff.apply(pipe, ratio=ranges)
        draw(pipe, steps=5, guidance=1.0)
        assert dense_calls(pipe) == {(5, 2)}


def test_last_steps_may_stay_dense(pipe: DiffusionPipeline) -> None:
    for end in (3, 0.6):
        tomadiff.apply(pipe, ratio=[(0, 0.5), (end, 0)])
        merged: list[int] = []
        for hook in denoiser(pipe)._tomadiff.sites:
            watch_merging(hook, merged)
        draw(pipe, steps=5, guidance=1.0)
        assert set(merged) == {0, 1, 2}, end


def test_each_range_of_steps_has_its_ratio_and_plans(pipe: DiffusionPipeline) -> None:
    """As often as asked for, a site runs on as many tokens as asked for; the rest is as with one ratio."""
    for ranges in ([(0, 0.25), (2, 0.75)], [(0, 0.25), (0.4, 0.75)]):
        tomadiff.apply(pipe, ratio=ranges, refresh_destinations=100, refresh_weights=100)
        seen: list[Any] = []

        def note(pipe: Any, step: int, time: Any, inputs: dict, seen: list[Any] = seen) -> dict:
            seen.append({site.kept / site.tokens for site in tomadiff.report(pipe).sites})
            return inputs

        draw(pipe, steps=5, guidance=1.0, callback_on_step_end=note)
        assert seen == [{0.75}, {0.75}, {0.25}, {0.25}, {0.25}]
        report = tomadiff.report(pipe)
        spans = len({hook.span.number for hook in denoiser(pipe)._tomadiff.sites})
        assert report.refreshes == {"destinations": 2 * spans, "weights": 0}, "a plan for each ratio"
        assert all([3 * site.tokens // 4, site.tokens // 4] == site.all_kept for site in report.sites)
        assert f"{report.sites[0].all_kept[0]} to {report.sites[0].all_kept[1]} " in str(report)
        assert "1 generation: 5 steps run, 0 forecast" in str(report)


def test_shares_of_steps_need_the_pipeline() -> None:
    pipe = make("sd1")
    tomadiff.apply(denoiser(pipe), ratio=[(0, 0.25), (0.5, 0.75)])
    with pytest.raises(ValueError, match="apply the pipeline"):
        draw(pipe)


def test_a_ratio_by_steps_is_refused_in_training() -> None:
    model = tomadiff.apply(denoiser(make("sd1")), ratio=[(0, 0.25), (4, 0.75)])
    with pytest.raises(ValueError, match="in training"):
        model(**bare_call(model))


def watch_merging(hook: Any, steps: list[int]) -> None:
    """Note the steps in which a site merges."""
    merge = hook.merge

    def noted(*args: Any) -> Any:
        steps.append(hook.session.clock.step)
        return merge(*args)

    hook.merge = noted


def test_all_steps_dense_equals_the_unpatched_model(pipe: DiffusionPipeline) -> None:
    before = draw(pipe)
    tomadiff.apply(pipe, ratio=[(100, 0.5)])
    with pytest.warns(UserWarning, match="nothing is merged"):
        assert torch.equal(draw(pipe), before)


def test_shifted_grids_take_turns(pipe: DiffusionPipeline) -> None:
    kept = {"share": "kind", "refresh_destinations": 100, "refresh_weights": 100}
    tomadiff.apply(pipe, ratio=0.5, shift=True, **kept)
    shifted = draw(pipe, steps=4, guidance=1.0)
    report = tomadiff.report(pipe)
    assert report.refreshes["destinations"] == 2 * len({(site.kind, site.tokens) for site in report.sites})
    tomadiff.apply(pipe, ratio=0.5, **kept)
    assert distance(shifted, draw(pipe, steps=4, guidance=1.0)) > 1e-4


def test_weighed_keys_change_attention_as_if_the_copies_were_there() -> None:
    """Where tokens are exact copies, attention over weighed keys equals attention over all of them."""
    for name in ("sd1", "flux"):
        pipe = make(name)
        model = denoiser(pipe)
        block = next(
            m
            for m in model.modules()
            if type(m).__name__ in ("BasicTransformerBlock", "FluxTransformerBlock")
        )
        errors = {}
        for weigh_keys in (False, True):
            tomadiff.apply(pipe, weigh_keys=weigh_keys, regions="global", where="block", dense_blocks=0)
            errors[weigh_keys] = copies_error(pipe, block, name)
            tomadiff.remove(pipe)
        assert errors[True] < 1e-5 < 1e-3 < errors[False], (name, errors)


def copies_error(pipe: DiffusionPipeline, block: nn.Module, name: str) -> float:
    """How far a merged block is from the dense one on eight tokens, copies in clusters of 4, 2, 1 and 1."""
    model = denoiser(pipe)
    patch = model._tomadiff
    hook = next(hook for hook in patch.sites if hook.bound.module is block)
    generator = torch.Generator().manual_seed(0)
    width = block.norm1.norm.normalized_shape[0] if name == "flux" else block.norm1.normalized_shape[0]
    distinct = 3 * torch.randn(1, 4, width, generator=generator)
    tokens = distinct[:, [0, 0, 0, 0, 1, 1, 2, 3]]
    call: dict[str, Any] = {"hidden_states": tokens}
    if name == "flux":  # no rotary table: copies at different places would not be copies
        call |= {
            "encoder_hidden_states": torch.randn(1, 3, width, generator=generator),
            "temb": torch.ones(1, width),
        }
    else:
        call |= {"encoder_hidden_states": torch.randn(1, 3, 32, generator=generator)}
    layout = Layout((1, 8))
    tasks = [hook.task(layout, 0.5, False) if each is hook else DENSE for each in patch.sites]
    patch.call = ModelCall(0, 0, False, layout, tasks, PlanCache(RefreshSchedule(1, 1)), patch.times)
    with torch.no_grad():
        dense, merged = hook.fn_ref.original_forward(**call), block(**call)
    patch.call = None
    if name == "flux":
        dense, merged = dense[1], merged[1]
    return distance(dense, merged)


def test_ratio_by_kind_and_by_level() -> None:
    pipe = tomadiff.apply(make("sdxl"), ratio={2: 0.75, 4: 0.25})
    draw(pipe)
    assert {(s.level, s.tokens, s.kept) for s in tomadiff.report(pipe).sites} == {(2, 64, 16), (4, 16, 12)}
    pipe = tomadiff.apply(make("flux"), ratio={"single": 0.5})
    draw(pipe)
    assert {(s.kind, s.tokens, s.kept) for s in tomadiff.report(pipe).sites} == {
        ("joint", 64, 64),
        ("single", 64, 32),
    }
    pipe = tomadiff.apply(make("sd1"), where="module", ratio={"self": 0.75, "mlp": 0.5})
    draw(pipe)
    shares = {(s.kind, s.kept / s.tokens) for s in tomadiff.report(pipe).sites}
    assert shares == {("self", 0.25), ("cross", 1.0), ("mlp", 0.5)}


def test_first_blocks_stay_dense() -> None:
    pipe = tomadiff.apply(make("flux"), ratio=0.5, dense_blocks=1)
    assert [site.name for site in tomadiff.report(pipe).sites] == [
        "transformer_blocks.1",
        "single_transformer_blocks.1",
    ]
    assert draw(pipe).isfinite().all()


def test_last_blocks_stay_dense() -> None:
    pipe = tomadiff.apply(make("flux"), ratio=0.5, dense_blocks=0, dense_last_blocks=1)
    assert [site.name for site in tomadiff.report(pipe).sites] == [
        "transformer_blocks.0",
        "single_transformer_blocks.0",
    ]
    pipe = tomadiff.apply(make("sdxl"), ratio=0.5, where="block", dense_blocks=1, dense_last_blocks=2)
    inner = [site.name for site in tomadiff.report(pipe).sites]
    tomadiff.apply(pipe, ratio=0.5, where="block", dense_blocks=0)
    assert inner == [site.name for site in tomadiff.report(pipe).sites][1:-2]


# -- beside other things -----------------------------------------------------------------------------------


def test_controlnet_residuals_reach_the_whole_tokens() -> None:
    """They are added between blocks, to all tokens, so that spans have to be cut there."""
    residuals = list(torch.randn(2, 1, 64, 32, generator=torch.Generator().manual_seed(2)))
    for name, argument in (("flux", "controlnet_block_samples"), ("sd3", "block_controlnet_hidden_states")):
        model = denoiser(make(name))
        call = bare_call(model)
        with torch.no_grad():
            tomadiff.apply(model, ratio=0.5, where="block")
            without, blocks = model(**call)[0], model(**call, **{argument: residuals})[0]
            tomadiff.apply(model, ratio=0.5, where="span")
            model(**call)  # whole spans before and after
            torch.testing.assert_close(model(**call, **{argument: residuals})[0], blocks)
            assert model(**call)[0].shape == without.shape
        assert distance(blocks, without) > 1e-3


def test_a_span_of_one_block_equals_a_block(pipe: DiffusionPipeline) -> None:
    """On ragged grids too."""
    for settings in ({}, {"shift": True, "share": "block"}, {"assign": "global"}, {"regions": "stripe"}):
        settings = {"share": "kind", "refresh_destinations": 1, "refresh_weights": 1, **settings}
        drawn = []
        for where in ("block", "span"):
            tomadiff.apply(pipe, ratio=0.4, where=where, **settings)
            for hook in denoiser(pipe)._tomadiff.sites:
                hook.span = Span(hook.index, hook.index)
            drawn.append(draw(pipe, seeds=(0, 1), size=(176, 272)))
        assert torch.equal(*drawn)


def test_offloading_does_not_lose_the_count_of_generations() -> None:
    """Offload hooks replace the model's forward when they go on, and again at the end of every generation."""
    pipe = tomadiff.apply(make("sd1"), ratio=0.5)
    fresh = draw(pipe, seeds=(1,))
    tomadiff.remove(pipe)
    for order in ("before", "after"):
        hook = accelerate.hooks.CpuOffload("cpu")
        if order == "before":
            accelerate.hooks.add_hook_to_module(pipe.unet, hook)
        tomadiff.apply(pipe, ratio=0.5)
        if order == "after":
            accelerate.hooks.add_hook_to_module(pipe.unet, hook)
        draw(pipe)
        accelerate.hooks.remove_hook_from_module(pipe.unet)
        assert torch.equal(draw(pipe, seeds=(1,)), fresh)
        assert tomadiff.report(pipe).generations == 2
        tomadiff.remove(pipe)


@pytest.mark.parametrize("name", ["sd1", "flux"])
def test_a_hook_that_comes_off_after_ours_leaves_a_model_that_works(name: str) -> None:
    """Accelerate's hooks put back the forward that they found, which was ours."""
    pipe = make(name)
    before = draw(pipe)
    tomadiff.apply(pipe, ratio=0.5)
    blocks = [hook.bound.module for hook in denoiser(pipe)._tomadiff.sites]
    for block in blocks:
        accelerate.hooks.add_hook_to_module(block, accelerate.hooks.ModelHook())
    merged = draw(pipe)
    tomadiff.remove(pipe)
    for block in blocks:
        accelerate.hooks.remove_hook_from_module(block)
    assert torch.equal(draw(pipe), before)
    tomadiff.apply(pipe, ratio=0.5)
    assert torch.equal(draw(pipe), merged)
    tomadiff.remove(pipe)
    assert torch.equal(draw(pipe), before)


def test_a_cache_that_skips_blocks_finds_tokens_in_their_order() -> None:
    """Also with spans of blocks, whose middle blocks hand on merged tokens."""
    results, model = [], denoiser(make("flux"))
    for spans in (True, False):
        tomadiff.apply(model, ratio=0.5)
        model.enable_cache(FirstBlockCacheConfig(threshold=1e9))  # always skip, after the first step
        if not spans:
            for hook in model._tomadiff.sites:
                hook.span = Span(hook.index, hook.index)
        call = bare_call(model)
        with torch.no_grad(), model.cache_context("cond"):
            results += [model(**call)[0], model(**call | {"timestep": torch.tensor([0.4])})[0]]
        model.disable_cache()
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    assert distance(results[0], results[1]) > 0


@pytest.mark.parametrize("where", ["span", "block"])
def test_torchs_hooks_between_blocks_find_tokens_in_their_order(where: str) -> None:
    """Which they may look at, or change, as if there were no merging."""
    model, seen = denoiser(make("flux")), []
    first, second = model.single_transformer_blocks
    watch = {
        "pre": lambda: second.register_forward_pre_hook(
            lambda block, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
        ),
        "post": lambda: first.register_forward_hook(lambda block, args, output: seen.append(output[1])),
    }
    with torch.no_grad():
        for register in watch.values():
            for on in (
                tomadiff.remove,
                lambda m: tomadiff.apply(m, ratio=1 / 16, region_size=4, where=where),
            ):
                on(model)
                model(**bare_call(model))  # without it before
                handle = register()
                model(**bare_call(model))
                handle.remove()
    for dense, merged in zip(seen[::2], seen[1::2]):
        assert merged.shape == dense.shape
        assert distance(merged, dense) < 0.3


def test_hooks_of_others_are_noticed_also_after_merged_has_ended() -> None:
    """`merged` takes our hooks off their modules and puts them on again."""
    seen: list[int] = []

    class Recorder(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
            seen.append(kwargs["hidden_states"].shape[1])
            return args, kwargs

    model = tomadiff.apply(denoiser(make("flux")), ratio=0.5, dense_blocks=0)
    call = bare_call(model)
    with torch.no_grad():
        model(**call)
        with tomadiff.merged(model, ratio=0.25):
            model(**call)
        blocks = model.transformer_blocks
        assert len(blocks) > 1, "or the last one's tokens are all there anyway"
        HookRegistry.check_if_exists_or_initialize(blocks[-1]).register_hook(Recorder(), "recorder")
        model(**call)
    assert seen == [call["hidden_states"].shape[1]]


def test_caches_that_would_keep_merged_tokens_are_refused() -> None:
    model = denoiser(make("flux"))
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    tomadiff.apply(model, ratio=0.5)
    with pytest.raises(ValueError, match=r"enable_cache\(\) after it"), model.cache_context("cond"):
        model(**bare_call(model))
    model.disable_cache()
    model.enable_cache(TaylorSeerCacheConfig())
    with pytest.raises(ValueError, match="caches inside blocks"), model.cache_context("cond"):
        model(**bare_call(model))


def test_a_pipeline_that_shares_the_model_counts_its_own_steps() -> None:
    pipe = tomadiff.apply(make("sd1"), ratio=[(0.5, 0.5)])
    draw(pipe, steps=8)
    second = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    second.set_progress_bar_config(disable=True)
    tomadiff.apply(second, ratio=[(0.5, 0.5)])
    embeds = {"prompt_embeds": text(0)[0], "negative_prompt_embeds": text(1)[0]}
    second(
        image=torch.rand(1, 3, 128, 128), strength=0.5, num_inference_steps=8, output_type="latent", **embeds
    )
    site = tomadiff.report(second).sites[0]
    assert (site.calls, site.dense_calls) == (4, 2), "four of eight steps are done, and half of them dense"


SCHEDULERS = [
    *(DDIMScheduler, DDPMScheduler, PNDMScheduler, LCMScheduler, HeunDiscreteScheduler),
    *(DPMSolverMultistepScheduler, UniPCMultistepScheduler, EulerAncestralDiscreteScheduler),
]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda cls: cls.__name__)
def test_every_scheduler_makes_one_generation_a_call_with_plans_on_schedule(scheduler: type) -> None:
    kept = {"share": "kind", "refresh_destinations": 2, "refresh_weights": 2}
    pipe = tomadiff.apply(make("sd1"), ratio=0.5, **kept)
    # as Stable Diffusion's own configuration has it
    pipe.scheduler = PNDMScheduler(skip_prk_steps=True) if scheduler is PNDMScheduler else scheduler()
    for count in (1, 2):
        draw(pipe, steps=4, generator=torch.Generator().manual_seed(0))
        assert tomadiff.report(pipe).generations == count
        # Heun evaluates the model twice in every step but one, PNDM in one
        assert denoiser(pipe)._tomadiff.clock.step in (3, 4, 6)
        assert len(denoiser(pipe)._tomadiff.plans) <= 4, "plans don't pile up"


def test_skipped_layers_do_not_leave_a_span_open() -> None:
    """SD3's skip-layer guidance leaves out blocks, the first or last of a span among them."""
    model = denoiser(make("sd3"))
    tomadiff.apply(model, ratio=0.5, where="span")
    with torch.no_grad():
        for skipped in ([0], [2], [0, 1, 2]):
            assert model(**bare_call(model), skip_layers=skipped)[0].shape == (1, 8, 16, 16)


def test_deepcopy_of_a_patched_pipeline_is_patched_and_independent(pipe: DiffusionPipeline) -> None:
    tomadiff.apply(pipe, ratio=[(0.5, 0.5)])
    image = draw(pipe, seeds=(0, 1, 2))
    twin = copy.deepcopy(pipe)
    assert mostly_alike(draw(twin, seeds=(0, 1, 2)), image)
    assert tomadiff.report(twin).model_calls["run"] > 0
    with torch.no_grad():
        for parameter in denoiser(twin).parameters():
            parameter.zero_()
    assert torch.equal(draw(pipe, seeds=(0, 1, 2)), image), "the original has weights and hooks of its own"
    assert distance(draw(twin, seeds=(0, 1, 2)), image) > 1e-3
    tomadiff.remove(twin)
    assert tomadiff.report(pipe).settings["ratio"] == ((0.5, 0.5),)


def test_a_patched_model_can_not_be_pickled_and_says_so(pipe: DiffusionPipeline) -> None:
    tomadiff.apply(pipe, ratio=0.5)
    with pytest.raises(TypeError, match=r"tomadiff\.remove first"):
        pickle.dumps(denoiser(pipe))
    tomadiff.remove(pipe)
    assert pickle.dumps(denoiser(pipe))


def test_save_pretrained_of_a_patched_pipeline_saves_the_plain_model(
    pipe: DiffusionPipeline, tmp_path: Path
) -> None:
    seeds = (0, 1, 2)
    dense = draw(pipe, seeds)
    tomadiff.apply(pipe, ratio=0.5)
    merged = draw(pipe, seeds)
    pipe.save_pretrained(tmp_path)
    absent = {name: None for name, part in pipe.components.items() if part is None}
    loaded = type(pipe).from_pretrained(tmp_path, **absent)
    loaded.set_progress_bar_config(disable=True)
    weights, saved = denoiser(pipe).state_dict(), denoiser(loaded).state_dict()
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[key], saved[key]) for key in weights)
    # Weights at another address may be aligned otherwise, and then sums round otherwise.
    assert alike(draw(loaded, seeds), dense)
    assert mostly_alike(draw(tomadiff.apply(loaded, ratio=0.5), seeds), merged)


@pytest.mark.parametrize("preset", ["toma", "toma_once", "toma_tile", "toma_stripe"])
def test_presets_draw_and_keep_plans_as_the_paper_does(
    pipe: DiffusionPipeline, name: str, preset: str
) -> None:
    tomadiff.apply(pipe, preset=preset, ratio=0.5)
    assert draw(pipe).isfinite().all()
    settings = tomadiff.report(pipe).settings
    reuse = (settings["refresh_destinations"], settings["refresh_weights"])
    assert reuse == ((10, 5) if name in ("sd1", "sdxl") else (1, 1))


def test_half_precision_is_finite_and_close(pipe: DiffusionPipeline) -> None:
    tomadiff.apply(pipe, ratio=0.5)
    full = draw(pipe)
    half = draw(pipe.to(torch.float16), dtype=torch.float16)
    assert half.isfinite().all()
    assert float((half.float() - full).norm() / full.norm()) < 0.1


def test_autocast_does_not_touch_the_precision_of_plans_and_residuals(name: str) -> None:
    model = tomadiff.apply(denoiser(make(name)), ratio=0.5)
    call = bare_call(model)
    with torch.no_grad():
        full = model(**call)[0]
        destinations = [kept.plan.destinations for kept in model._tomadiff.plans.values()]
        with torch.autocast("cpu", dtype=torch.float16):
            half = model(**call)[0]
    plan = next(iter(model._tomadiff.plans.values())).plan
    assert plan.assignment.dtype == torch.float32
    torch.testing.assert_close(plan.assignment.sum(1), torch.ones_like(plan.assignment.sum(1)))
    assert torch.equal(plan.destinations, destinations[0]), "the first plan is made from the same tokens"
    assert float((half.float() - full).norm() / full.norm()) < 0.1


@pytest.mark.parametrize("settings", PLACES, ids=str)
def test_gradients_flow_through_merged_blocks(name: str, settings: dict[str, Any]) -> None:
    model = denoiser(make(name)).train()
    tomadiff.apply(model, ratio=0.5, **settings)
    model(**bare_call(model))[0].square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) > 20 and all(g.isfinite().all() for g in gradients)
