"""Without settings, keys of long sequences are merged where that gains; attention stays as it is elsewhere.

Tiny pictures are long enough here: 256 tokens at the finest level of the UNet, 64 at the next.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from comparison import mostly_alike, state
from diffusers import DiffusionPipeline, HeunDiscreteScheduler
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from pipelines import denoiser, draw, make, shallow

import tomadiff
from tomadiff.runtime import autotune, long_keys, tolerance
from tomadiff.runtime.planner import Planner

STEPS, TOKENS = 8, 256  # with so few steps, every second one is forecast
# what is merged by itself, said by settings
KEYS: dict[str, Any] = {
    "where": "kv",
    "weigh_keys": True,
    "ratio": [(1, {1: long_keys.RATIO}), (STEPS // 2, 0)],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOMADIFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(long_keys, "SHOWN", {"unet": long_keys.Shown(TOKENS, ("AttnProcessor2_0",))})
    return tmp_path / "cache" / "auto"


@pytest.fixture
def gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the times are."""
    monkeypatch.setattr(autotune, "LEAST", 0.0)
    monkeypatch.setattr(long_keys, "WORTH", -math.inf)


def drawn(pipe: DiffusionPipeline, **settings: Any) -> torch.Tensor:
    tomadiff.apply(pipe, **settings)
    return draw(pipe, steps=STEPS)


def left_alone(pipe: DiffusionPipeline, says: str) -> None:
    """The picture is that of forecasts alone, and the report says so."""
    expected = drawn(pipe, interval=2)
    assert torch.equal(drawn(pipe), expected)
    assert says in str(tomadiff.report(pipe))


def test_keys_are_merged_in_the_first_half_but_for_the_first_step_and_the_report_says_so(gains: None) -> None:
    pipe = make("sd1")
    expected = drawn(pipe, interval=2, **KEYS)
    assert torch.equal(drawn(pipe), expected)
    report = tomadiff.report(pipe)
    says = "keys merged at 0.5 from 256 tokens on, in the first 50% of the steps: attention"
    assert says in str(report)
    merged = [site for site in report.sites if site.kind == "kv"]
    assert merged and {(site.level, site.tokens, site.kept) for site in merged} == {(1, 256, 128)}
    # of steps 0, 2, 4, 6 and 7, keys are merged in step 2
    assert report.steps["run"] == 5 and {(site.calls, site.dense_calls) for site in merged} == {(5, 4)}


def test_the_picture_is_the_same_just_measured_known_and_from_the_disk(gains: None, folder: Path) -> None:
    pipe = make("sd1")
    pictures = [drawn(pipe), draw(pipe, steps=STEPS)]
    assert len(list(folder.iterdir())) == 1
    assert all(torch.equal(picture, pictures[0]) for picture in (*pictures, drawn(pipe)))
    assert len(list(folder.iterdir())) == 1


def test_a_size_that_does_not_tolerate_merged_tokens_may_still_have_merged_keys(
    gains: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tolerance, "LIMIT_OF_FIRST_HALF", 0.0)
    pipe = make("sd1")
    expected = drawn(pipe)
    with pytest.warns(UserWarning, match="changed the model's output"):
        draw(pipe, steps=3)  # too few for forecasts, so tokens would be merged
    assert torch.equal(draw(pipe, steps=STEPS), expected)
    assert any(site.kind == "kv" and site.calls > site.dense_calls for site in tomadiff.report(pipe).sites)


def test_where_too_little_is_saved_attention_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_keys, "WORTH", math.inf)
    left_alone(make("sd1"), "keys not merged from 256 tokens on")


def test_below_that_length_the_model_gets_no_further_hooks(
    gains: None, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(long_keys, "SHOWN", {"unet": long_keys.Shown(TOKENS + 1, ("AttnProcessor2_0",))})
    pipe = make("sd1")
    expected = drawn(pipe, interval=2)
    tomadiff.apply(pipe)
    before = state(pipe.unet)
    assert torch.equal(draw(pipe, steps=STEPS), expected)
    assert state(pipe.unet) == before and not folder.exists()
    assert "keys" not in str(tomadiff.report(pipe))


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_families_in_which_closeness_was_not_shown_are_left_alone(name: str, gains: None) -> None:
    pipe = make(name)
    expected = drawn(pipe, interval=2)
    assert torch.equal(drawn(pipe), expected)
    assert denoiser(pipe)._tomadiff.long_keys is None


@pytest.mark.parametrize("settings", [{"interval": 2}, {"ratio": 0.5}, {"interval": "auto", "ratio": 0.0}])
def test_what_was_asked_is_what_is_done(settings: dict[str, Any], gains: None) -> None:
    pipe = tomadiff.apply(make("sd1"), **settings)
    draw(pipe, steps=STEPS)
    assert "kv" not in {site.kind for site in tomadiff.report(pipe).sites}


def test_a_sampler_whose_steps_all_run_still_merges_spans(gains: None) -> None:
    pipe = make("sd1")
    drawn(pipe)
    pipe.scheduler = HeunDiscreteScheduler()
    picture = draw(pipe, steps=STEPS)  # beside hooks that wait for long sequences
    tomadiff.apply(pipe, ratio=[(0, 0.5), (STEPS, 0)])  # it calls the model twice a step
    assert torch.equal(picture, draw(pipe, steps=STEPS))


def test_measuring_calls_the_model_no_more_often(gains: None) -> None:
    pipe, calls = make("sd1"), []
    pipe.unet.mid_block.register_forward_hook(lambda *_: calls.append(1))
    drawn(pipe, interval=2)
    forecasts = len(calls)
    drawn(pipe)
    assert len(calls) == 2 * forecasts


def test_all_levels_that_are_long_enough_take_part_when_they_come(gains: None) -> None:
    pipe = make("sd1")
    drawn(pipe)
    draw(pipe, steps=STEPS, size=(256, 256))
    report = tomadiff.report(pipe)
    assert {(site.level, site.kept) for site in report.sites if site.kind == "kv"} == {(1, 512), (2, 128)}
    picture = draw(pipe, steps=STEPS)
    assert torch.equal(picture, drawn(pipe)), "and others stay dense where they are not"


def test_remove_is_bit_exact(gains: None) -> None:
    pipe = make("sd1")
    before, expected = state(pipe.unet), draw(pipe, steps=STEPS)
    assert not torch.equal(drawn(pipe), expected)
    tomadiff.remove(pipe)
    assert state(pipe.unet) == before and torch.equal(draw(pipe, steps=STEPS), expected)


def test_a_copy_merges_for_itself(gains: None) -> None:
    pipe, seeds = tomadiff.apply(make("sd1")), (0, 1, 2)
    expected = draw(pipe, seeds, steps=STEPS)
    twin = copy.deepcopy(pipe)
    assert mostly_alike(draw(twin, seeds, steps=STEPS), expected)
    assert twin.unet._tomadiff.long_keys.hooks and torch.equal(draw(pipe, seeds, steps=STEPS), expected)


@pytest.mark.parametrize("how", ["sequential", "block_level", "leaf_level"])
def test_offloaded_models_measure_and_merge_as_well(
    how: str, gains: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, cpu = make("sd1"), torch.device("cpu")
    expected = drawn(pipe)
    tomadiff.remove(pipe)
    if how == "sequential":
        accelerate.cpu_offload(pipe.unet, cpu)
        monkeypatch.setattr(type(pipe), "_execution_device", cpu)  # the pipeline takes it for meta
    else:
        blocks = {"num_blocks_per_group": 1} if how == "block_level" else {}
        pipe.unet.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type=how, **blocks)
    for file in folder.iterdir():  # measured anew
        file.unlink()
    torch.testing.assert_close(drawn(pipe), expected)
    assert "keys merged at" in str(tomadiff.report(pipe))


class Own(AttnProcessor2_0):
    """Someone else's attention."""


def test_attention_of_others_is_left_alone(gains: None) -> None:
    pipe = make("sd1")
    for processor in (Own(), AttnProcessor()):
        pipe.unet.set_attn_processor(processor)
        left_alone(pipe, f"has a {type(processor).__name__}")
    pipe.unet.set_attn_processor(AttnProcessor2_0())
    expected = drawn(pipe, interval=2)
    assert not torch.equal(drawn(pipe), expected)


def test_a_mask_over_image_tokens_leaves_attention_alone(gains: None) -> None:
    pipe = make("sd1")
    masks: dict[str, Any] = {"cross_attention_kwargs": {"ip_adapter_masks": [torch.ones(1, 1, 16, 16)]}}
    tomadiff.apply(pipe, interval=2)
    expected = draw(pipe, steps=STEPS, **masks)
    tomadiff.apply(pipe)
    assert torch.equal(draw(pipe, steps=STEPS, **masks), expected)
    assert "was called with ip_adapter_masks" in str(tomadiff.report(pipe))


@pytest.mark.parametrize("how", ["compile", "torch.compile", "blocks"])
def test_a_compiled_model_is_left_alone(how: str, gains: None) -> None:
    pipe = tomadiff.apply(shallow("sd1"))
    draw(pipe, steps=STEPS)
    assert pipe.unet._tomadiff.long_keys.hooks
    if how == "compile":
        pipe.unet.compile(backend="eager")
    elif how == "blocks":
        pipe.unet.compile_repeated_blocks(backend="eager", fullgraph=True)
    else:
        pipe.unet = torch.compile(pipe.unet, backend="eager")
    picture = draw(pipe, steps=STEPS)
    assert "keys not merged: the model is compiled" in str(tomadiff.report(pipe))
    torch.testing.assert_close(picture, drawn(shallow("sd1"), interval=2))


def test_an_error_while_measuring_leaves_attention_alone(
    gains: None, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Planner, "plan", fail)
    pipe = make("sd1")
    left_alone(pipe, "RuntimeError: out of luck")
    draw(pipe, steps=STEPS)
    assert len(calls) == 1 and not folder.exists(), "it is not tried again"


def test_a_generation_that_breaks_off_while_measuring_leaves_the_next_one_as_it_should_be(
    gains: None,
) -> None:
    pipe = make("sd1")
    expected = drawn(pipe)
    tomadiff.remove(pipe)

    def stop(*_: Any) -> None:
        handle.remove()
        raise KeyboardInterrupt

    handle = pipe.unet.mid_block.register_forward_hook(stop)
    tomadiff.apply(pipe)
    with pytest.raises(KeyboardInterrupt):
        draw(pipe, steps=STEPS)
    assert torch.equal(draw(pipe, steps=STEPS), expected)
