"""Nothing silent: what can't be honoured is an error that says what to do."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    StableDiffusionSAGPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)
from pipelines import bare_call, denoiser, draw, make, text
from torch._inductor.compile_worker.subproc_pool import SubprocException

import tomadiff
from tomadiff.errors import ConfigError, NotPatchedError, UnsupportedModelError, reason
from tomadiff.models import Site, unet
from tomadiff.runtime.sites import find


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ratio": 1.0}, "below 1"),
        ({"ratio": -0.1}, "at least 0"),
        ({"ratio": float("nan")}, "at least 0"),
        ({"ratio": "0.5"}, "share of tokens"),
        ({"ratio": True}, "share of tokens"),
        ({"ratio": {"block": 1.5}}, "below 1"),
        ({"ratio": {}}, "names no part"),
        ({"ratio": 0.01}, "removes nothing"),
        ({"ratio": 0.2, "region_size": 2}, "removes nothing"),
        ({"ratio": {"block": 0.5, 2: 0.5}}, "one sort"),
        ({"ratio": {"blocks": 0.5}}, "it has 1, 2, 'block'"),
        ({"ratio": {16: 0.5}}, "it has 1, 2, 'block'"),
        ({"ratios": 0.5}, "did you mean 'ratio'"),
        ({"preset": "toma_tiles"}, "did you mean 'toma_tile'"),
        ({"method": "tomato"}, "'toma'"),
        ({"regions": "tiles"}, "'tile', 'stripe', 'global'"),
        ({"where": "everywhere"}, "'block', 'module', 'span'"),
        ({"assign": "nearest"}, "'region', 'global'"),
        ({"unmerge": "inverse"}, "'transpose', 'pinv'"),
        ({"share": "all"}, "'kind', 'block'"),
        ({"region_size": 0}, "at least 1"),
        ({"region_size": 8.0}, "whole number"),
        ({"region_size": (2, 0, 8)}, "one for each axis"),
        ({"region_size": ()}, "one for each axis"),
        ({"region_size": (1, 2, 2), "ratio": 0.2}, "removes nothing"),
        ({"region_size": (4, 4, 4)}, "tokens of unet are on grids of 2 axes"),
        ({"region_size": (4,)}, "tokens of unet are on grids of 2 axes"),
        ({"scale": 0}, "positive"),
        ({"modules": ()}, "one or more"),
        ({"modules": 5}, "one or more"),
        ({"modules": ("self", "attention"), "where": "module"}, "'self', 'cross', 'mlp'"),
        ({"modules": ("self",)}, 'needs where="module"'),
        ({"refresh_destinations": 7, "refresh_weights": 5}, "multiple"),
        ({"refresh_weights": 0}, "at least 1"),
        ({"dense_blocks": -1}, "at least 0"),
        ({"dense_blocks": 50}, "dense_blocks=50"),
        ({"dense_last_blocks": -1}, "at least 0"),
        ({"dense_last_blocks": None}, "at least 0"),
        ({"dense_blocks": 1, "dense_last_blocks": 50}, "dense_blocks=1 and dense_last_blocks=50"),
        ({"ratio": []}, "pairs"),
        ({"ratio": [0.5]}, "pairs"),
        ({"ratio": [(0, 0.5, 1)]}, "pairs"),
        ({"ratio": [(0, 0.5), (0, 0.25)]}, "that grow"),
        ({"ratio": [(4, 0.5), (2, 0.25)]}, "that grow"),
        ({"ratio": [(4, 0.5), (0.5, 0.25)]}, "steps (ints from 0) or shares"),
        ({"ratio": [(1.5, 0.5)]}, "floats below 1"),
        ({"ratio": [(-1, 0.5)]}, "ints from 0"),
        ({"ratio": [(0, 0.5), (4, 1.0)]}, "below 1"),
        ({"ratio": [(0, 0.5), (4, {16: 0.5})]}, "it has 1, 2, 'block'"),
        ({"shift": True, "regions": "global"}, "can't be shifted"),
        ({"shift": "yes"}, "True or False"),
        ({"weigh_keys": 1}, "True or False"),
        ({"weigh_keys": True, "where": "module", "modules": ("mlp",)}, "takes a mask"),
        ({"method": "tome", "regions": "tile"}, "method='tome' has no such setting"),
        ({"method": "tofu", "scale": 10.0}, "method='tofu' has no such setting"),
        ({"method": "tome", "ratio": 0.8}, "at most 0.75"),
        ({"method": "tofu", "ratio": {1: 0.9}}, "at most 0.75"),
        ({"method": "tofu", "share": "kind"}, 'needs share="block"'),
        ({"method": "tome", "refresh_destinations": 5}, "must be the same"),
        ({"method": "todo", "ratio": 0.5}, "whole factors"),
        ({"method": "todo", "where": "block"}, 'needs where="kv"'),
        ({"method": "todo", "unmerge": "pinv"}, "has no such setting"),
        ({"where": "kv", "modules": "self"}, 'needs where="module"'),
    ],
    ids=str,
)
def test_bad_settings_are_refused_with_advice(settings: dict[str, Any], says: str) -> None:
    pipe = make("sd1")
    with pytest.raises(ValueError) as error:
        tomadiff.apply(pipe, **settings)
    assert says in str(error.value)
    assert not hasattr(pipe.unet, "_tomadiff")


def test_settings_that_look_contradictory_but_are_not() -> None:
    tomadiff.Config(regions="global", assign="region")
    tomadiff.Config(regions="global", assign="global")
    tomadiff.Config(refresh_destinations=5, refresh_weights=5)
    tomadiff.Config(modules=("mlp", "cross", "self"))
    tomadiff.Config(ratio=0.01, regions="global")
    tomadiff.Config(method="tome", ratio={1: 0.5}, where="block", refresh_destinations=5, refresh_weights=5)
    tomadiff.Config(method="todo", ratio=0.889, shift=True)


@pytest.mark.parametrize("method", ["toma", "tome", "tofu", "todo", "ideal"])
def test_a_config_can_be_made_again_from_its_settings(method: str) -> None:
    config = tomadiff.Config(method=method)
    assert tomadiff.Config(**config.to_dict()) == config


def test_config_is_frozen_and_keeps_a_copy() -> None:
    ratio = {"block": 0.5}
    config = tomadiff.Config(ratio=ratio)
    ratio["block"] = 2.0
    assert config.ratio == {"block": 0.5}
    with pytest.raises(AttributeError):
        config.scale = 1.0


def test_a_config_and_keywords_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="not both"):
        tomadiff.apply(make("sd1"), tomadiff.Config(), ratio=0.5)
    with pytest.raises(ConfigError, match=r"tomadiff\.Config"):
        tomadiff.apply(make("sd1"), 0.5)


def test_a_refused_change_keeps_what_was_applied() -> None:
    pipe = tomadiff.apply(make("sd1"), ratio=0.25)
    with pytest.raises(ConfigError):
        tomadiff.apply(pipe, ratio=2)
    assert tomadiff.report(pipe).settings["ratio"] == 0.25


@pytest.mark.parametrize("model", [AutoencoderKL, UNet2DModel])
def test_models_that_cannot_be_merged_are_refused_with_the_reason(model: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"can't be (merged|made faster): it"):
        tomadiff.apply(model())


@pytest.mark.parametrize("model", [lambda: torch.nn.Linear(2, 2), object])
def test_a_model_of_no_family_is_refused_by_naming_the_families(model: Any) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        tomadiff.apply(model())
    for family in tomadiff.families():
        assert family.name in str(error.value)
        assert family.models[0] in str(error.value)


def test_a_unet_without_transformer_blocks_is_refused() -> None:
    unet = UNet2DConditionModel(
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        mid_block_type=None,
        norm_num_groups=4,
    )
    with pytest.raises(UnsupportedModelError, match="BasicTransformerBlock"):
        tomadiff.apply(unet)


def test_keys_that_cannot_be_weighed_are_refused() -> None:
    with pytest.raises(ConfigError, match="sd3"):
        tomadiff.apply(make("sd3"), weigh_keys=True)


def test_modules_that_a_model_lacks_are_refused() -> None:
    with pytest.raises(ConfigError, match="leaves nothing to merge"):
        tomadiff.apply(make("flux"), where="module", modules=("cross",))


def test_remove_on_an_unpatched_model_does_nothing(pipe: DiffusionPipeline) -> None:
    before = draw(pipe)
    assert tomadiff.remove(pipe) is pipe
    assert torch.equal(draw(pipe), before)


def test_report_on_an_unpatched_model_is_an_error(pipe: DiffusionPipeline) -> None:
    with pytest.raises(NotPatchedError, match=r"tomadiff\.apply"):
        tomadiff.report(pipe)


def test_a_mask_over_image_tokens_is_refused() -> None:
    """diffusers would pad it to the wrong length without a word."""
    unet = tomadiff.apply(make("sd1").unet, ratio=0.5)
    with pytest.raises(ConfigError, match="attention_mask"), torch.no_grad():
        unet(torch.randn(1, 4, 16, 16), 500, text(0)[0], attention_mask=torch.ones(1, 256))


@pytest.mark.parametrize("where", ["span", "block", "module", "kv"])
def test_a_mask_in_a_dict_of_attentions_arguments_is_refused(where: str) -> None:
    model = tomadiff.apply(make("flux").transformer, ratio=0.5, where=where)
    mask = {"joint_attention_kwargs": {"attention_mask": torch.ones(1, 1, 1, 1)}}
    with pytest.raises(ConfigError, match="called with attention_mask"), torch.no_grad():
        model(**bare_call(model), **mask)


def test_an_ip_adapters_mask_is_refused() -> None:
    """diffusers would lay it over merged tokens as if they were a smaller picture."""
    for where in ("block", "module"):
        unet = tomadiff.apply(make("sd1").unet, ratio=0.5, where=where)
        masks = {"ip_adapter_masks": [torch.ones(1, 1, 16, 16)]}
        with pytest.raises(ConfigError, match="ip_adapter_masks"), torch.no_grad():
            unet(torch.randn(1, 4, 16, 16), 500, text(0)[0], cross_attention_kwargs=masks)


def test_gradient_checkpointing_is_refused(pipe: DiffusionPipeline) -> None:
    """It would run blocks again with the plans of a later call."""
    model = tomadiff.apply(denoiser(pipe), ratio=0.5).train()
    model.enable_gradient_checkpointing()
    with pytest.raises(ConfigError, match="checkpointing"):
        model(**bare_call(model))


def test_what_records_attention_is_refused_in_the_middle_of_a_generation_too() -> None:
    model = tomadiff.apply(denoiser(make("sd1")), ratio=0.5)
    attention = model._tomadiff.sites[0].attentions[0]
    with torch.no_grad():
        model(**bare_call(model) | {"timestep": torch.tensor(900)})
        attention.set_processor(sys.modules[StableDiffusionSAGPipeline.__module__].CrossAttnStoreProcessor())
        with pytest.raises(ConfigError, match="whose attention maps have to be of all tokens"):
            model(**bare_call(model) | {"timestep": torch.tensor(800)})


def test_weighing_keys_is_refused_where_blocks_attend_to_text_alone() -> None:
    unet = make("sd1").unet
    for module in unet.modules():
        if type(module).__name__ == "BasicTransformerBlock":
            module.only_cross_attention = True
    with pytest.raises(ConfigError, match="text alone"):
        tomadiff.apply(unet, weigh_keys=True)


@torch.no_grad()
def test_attention_that_was_replaced_is_told_but_not_if_it_merges_in_other_calls() -> None:
    """The latter is what a cache does that skips all blocks in some calls."""
    for merged_before in (False, True):
        model = tomadiff.apply(denoiser(make("sd1")), ratio=0.5, where="kv")
        if merged_before:
            model(**bare_call(model))
        for hook in model._tomadiff.sites:
            attention = hook.bound.module
            attention.forward = partial(type(attention).forward, attention)
        with (
            nullcontext()
            if merged_before
            else pytest.raises(UnsupportedModelError, match="no keys and values")
        ):
            model(**bare_call(model))


def test_a_block_that_is_left_out_of_its_span_is_an_error() -> None:
    model = tomadiff.apply(denoiser(make("flux")), ratio=0.5, where="span", dense_blocks=0)
    last = model.single_transformer_blocks[-1]
    last.forward = lambda hidden_states, encoder_hidden_states, **_: (encoder_hidden_states, hidden_states)
    with pytest.raises(UnsupportedModelError, match="left out"), torch.no_grad():
        model(**bare_call(model))


def test_tokens_that_are_no_grid_are_refused_unless_stripes_do() -> None:
    """As with tokens of a picture of which some are left out."""
    pipe = make("flux")
    model = denoiser(pipe)
    call = {
        "hidden_states": torch.randn(1, 40, 16),
        "encoder_hidden_states": text(0)[0],
        "pooled_projections": text(0)[1],
        "timestep": torch.tensor([0.5]),
        "img_ids": grid_ids(6, 8, 0)[8:],
        "txt_ids": torch.zeros(7, 3),
        "return_dict": False,
    }
    call["img_ids"] = torch.cat([call["img_ids"][:20], call["img_ids"][20:].flip(0)])
    with torch.no_grad():
        tomadiff.apply(model, ratio=0.5)
        with pytest.raises(UnsupportedModelError, match="stripe"):
            model(**call)
        tomadiff.apply(model, ratio=0.5, regions="stripe")
        assert model(**call)[0].shape == (1, 40, 16)


def test_chunks_of_tokens_are_refused_unless_stripes_do() -> None:
    """With feed-forward chunking, a block gives its MLP some rows of the grid at a time."""
    model = denoiser(make("sd1"))
    for block in model.modules():
        if hasattr(block, "set_chunk_feed_forward"):
            block.set_chunk_feed_forward(16, 1)
    settings = {"ratio": 0.5, "where": "module", "modules": "mlp", "dense_blocks": 0}
    with torch.no_grad():
        tomadiff.apply(model, **settings)
        with pytest.raises(UnsupportedModelError, match=r"got 16 tokens.*turn feed-forward chunking off"):
            model(**bare_call(model))
        tomadiff.apply(model, **settings, regions="stripe")
        assert model(**bare_call(model))[0].isfinite().all()


def grid_ids(height: int, width: int, image: int) -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.full_like(rows, image), rows, columns], dim=-1).reshape(-1, 3).float()


def test_a_declaration_with_an_argument_that_a_module_lacks_is_told() -> None:
    wrong = dataclasses.replace(unet.FAMILY.blocks[0], modules=(Site("mlp", "ff", tokens="x"),))
    family = dataclasses.replace(unet.FAMILY, blocks=(wrong,))
    config = tomadiff.Config(where="module", modules="mlp").resolve(family)
    with pytest.raises(UnsupportedModelError, match="tokens='x' for ff, and FeedForward takes hidden_states"):
        find(make("sd1").unet, family, config)


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_a_part_of_a_model_that_is_called_alone_is_refused(name: str) -> None:
    """Without the hooks on the model nobody knows which picture it is, and plans would be another's."""
    pipe = tomadiff.apply(make(name), ratio=0.5)
    model = denoiser(pipe)
    merged = draw(pipe)
    with torch.no_grad(), pytest.raises(ConfigError, match="from outside a call of its model"):
        model.forward(**bare_call(model))
    assert torch.equal(draw(pipe), merged)
    tomadiff.remove(pipe)
    with torch.no_grad():
        assert torch.equal(model.forward(**bare_call(model))[0], model(**bare_call(model))[0])


def test_the_reason_of_an_error_in_another_process_is_the_last_line_of_its_traceback() -> None:
    """Inductor compiles kernels in processes of their own, and hands on what they print."""
    try:
        raise ValueError("no such instruction")
    except ValueError:
        error = SubprocException(traceback.format_exc())
    assert reason(error) == "SubprocException: ValueError: no such instruction"


def test_the_reason_is_the_first_line_of_the_first_cause() -> None:
    error, empty = RuntimeError("can't launch"), KeyError()
    error.__cause__ = OSError("no driver\nand more")
    assert reason(error) == "OSError: no driver"
    assert reason(empty) == "KeyError()"
    empty.__cause__ = empty
    assert reason(empty) == "KeyError()", "also if it is its own cause"
