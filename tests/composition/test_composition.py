"""Beside other things that people do to pipelines: both work, or an error says what to do."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import cache_dit
import pytest
import torch
from comparison import mostly_alike
from DeepCache import DeepCacheSDHelper
from diffusers import (
    ControlNetModel,
    DDIMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FirstBlockCacheConfig,
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxImg2ImgPipeline,
    FluxInpaintPipeline,
    HeunDiscreteScheduler,
    LCMScheduler,
    LEditsPPPipelineStableDiffusion,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SD3ControlNetModel,
    SD3Transformer2DModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusion3PAGPipeline,
    StableDiffusionAttendAndExcitePipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPAGPipeline,
    StableDiffusionPanoramaPipeline,
    StableDiffusionPipeline,
    StableDiffusionPix2PixZeroPipeline,
    StableDiffusionSAGPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPAGPipeline,
    WanPipeline,
)
from diffusers.hooks import (
    SmoothedEnergyGuidanceConfig,
    apply_first_block_cache,
    apply_pyramid_attention_broadcast,
)
from diffusers.hooks.smoothed_energy_guidance_utils import _apply_smoothed_energy_guidance_hook
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import IPAdapterTimeImageProjection
from peft import LoraConfig, get_peft_model_state_dict
from pipelines import MAKERS, WIDTH, bare_call, denoiser, draw, latents, make, steps_that_run, text, vae
from tiny import build, wan
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import tomadiff
from tomadiff.errors import ConfigError

# every family as it is by default and with merged keys, and other depths on a UNet and on transformers
PAIRS = [
    *(("sd1", "span"), ("sdxl", "span"), ("sd3", "span"), ("flux", "span")),
    *(("sd1", "kv"), ("sdxl", "kv"), ("sd3", "kv"), ("flux", "kv")),
    *(("sdxl", "module"), ("flux", "block"), ("sd3", "module")),
]
UNETS = [pair for pair in PAIRS if pair[0] in ("sd1", "sdxl")]
FORECASTS = [(name, "forecasts") for name in MAKERS]
Draw = Callable[[], Tensor]


def at(how: str) -> dict[str, Any]:
    """Settings: forecasts alone, or where to merge. Where only keys are merged, they should be weighed."""
    return {"interval": 2} if how == "forecasts" else {"ratio": 0.5, "where": how, "weigh_keys": how == "kv"}


def steps(how: str) -> int:
    """Merging shows in two, forecasts don't."""
    return 8 if how == "forecasts" else 2


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def reduced(target: Any) -> bool:
    """Whether every site ran, and on fewer tokens than it was given."""
    sites = tomadiff.report(target).sites
    return all(site.calls > site.dense_calls and site.kept < site.tokens for site in sites)


@contextmanager
def steps_inside(model: nn.Module) -> Iterator[set[int]]:
    """The steps in which anything of a patched model is called."""
    clock, ran = model._tomadiff.clock, set()
    handles = [part.register_forward_pre_hook(lambda *_: ran.add(clock.step)) for part in model.modules()]
    yield ran
    for handle in handles:
        handle.remove()


def drawn(pipe: DiffusionPipeline, run: Draw, settings: dict[str, Any]) -> Tensor:
    """The picture, of which tokens were merged; or, with an interval alone, steps skipped."""
    if "ratio" in settings:
        picture = run()
        assert reduced(pipe)
        return picture
    with steps_inside(denoiser(pipe)) as ran:
        picture = run()
    # of eight steps; the second may have to run, too, so that it is known which arguments change
    assert ran | {1} == {0, 1, 2, 4, 6, 7}, "skipped steps call nothing of the model"
    return picture


def check(pipe: DiffusionPipeline, run: Draw, **settings: Any) -> Tensor:
    """What all combinations promise: it does something, repeats, and is gone without a trace; the picture."""
    settings = settings if "interval" in settings else {"ratio": 0.5, **settings}
    dense = run()
    tomadiff.apply(pipe, **settings)
    changed = drawn(pipe, run, settings)
    assert changed.isfinite().all() and changed.shape == dense.shape
    assert distance(changed, dense) > 1e-4, "the picture must change, or nothing is tested"
    assert torch.equal(run(), changed)
    tomadiff.remove(pipe)
    assert torch.equal(run(), dense), "bit-exact"
    return changed


def parts(pipe: DiffusionPipeline, kind: type, **more: Any) -> dict[str, Any]:
    """The components of a pipeline that another kind takes, for it to be made of."""
    names = kind.__init__.__annotations__
    taken = {name: part for name, part in pipe.components.items() if name in names}
    return taken | ({"requires_safety_checker": False} if "requires_safety_checker" in names else {}) | more


def remade(pipe: DiffusionPipeline, kind: type, **more: Any) -> DiffusionPipeline:
    other = kind(**parts(pipe, kind, **more))
    other.set_progress_bar_config(disable=True)
    return other


def prompt(pipe: DiffusionPipeline, **more: Any) -> dict[str, Any]:
    """Arguments for the call of any pipeline, two steps from a fixed seed, with guidance."""
    (embeds, pooled), (negative, negative_pooled) = text(0), text(999)
    call = {"prompt_embeds": embeds, "negative_prompt_embeds": negative}
    if "pooled_prompt_embeds" in type(pipe).__call__.__annotations__:
        call |= {"pooled_prompt_embeds": pooled, "negative_pooled_prompt_embeds": negative_pooled}
    call |= {"num_inference_steps": 2, "output_type": "latent", "generator": torch.Generator().manual_seed(0)}
    guidance = "true_cfg_scale" if "Flux" in type(pipe).__name__ else "guidance_scale"
    return {**call, guidance: 3.0, **more}


def picture(seed: int = 0, size: int = 128, channels: int = 3) -> Tensor:
    return torch.rand(1, channels, size, size, generator=torch.Generator().manual_seed(seed))


# -- LoRA --------------------------------------------------------------------------------------------------


@functools.cache
def lora(name: str) -> dict[str, Tensor]:
    """Weights of a LoRA on attention and MLPs, as a training would save them."""
    layers = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2", "proj_mlp", "proj_out"]
    model = denoiser(make(name))
    model.add_adapter(LoraConfig(r=4, lora_alpha=16, target_modules=layers, init_lora_weights=False))
    prefix = "unet" if name in ("sd1", "sdxl") else "transformer"
    return {f"{prefix}.{key}": value for key, value in get_peft_model_state_dict(model).items()}


@pytest.mark.parametrize(("name", "how"), [*PAIRS, *FORECASTS])
def test_a_lora_acts_alike_before_and_after_apply_and_comes_off(name: str, how: str) -> None:
    weights, pipe = lora(name), make(name)
    run: Draw = lambda: draw(pipe, seeds=(0, 1), steps=steps(how))  # noqa: E731
    dense = run()
    tomadiff.apply(pipe, **at(how))
    plain = run()
    tomadiff.remove(pipe)
    pipe.load_lora_weights(dict(weights))
    loaded_before = check(pipe, run, **at(how))
    assert distance(loaded_before, plain) > 1e-3, "the LoRA changes the picture"
    pipe.unload_lora_weights()
    tomadiff.apply(pipe, **at(how))
    assert torch.equal(run(), plain)
    pipe.load_lora_weights(dict(weights))
    assert mostly_alike(run(), loaded_before)
    pipe.unload_lora_weights()
    assert torch.equal(run(), plain), "unloading gives back the picture"
    tomadiff.remove(pipe)
    assert torch.equal(run(), dense)


@pytest.mark.parametrize("name", ["sd1", "sdxl", "sd3", "flux"])
def test_a_fused_lora_acts_as_one_that_is_loaded(name: str) -> None:
    pipe = tomadiff.apply(make(name), ratio=0.5)
    plain = draw(pipe)
    pipe.load_lora_weights(dict(lora(name)))
    loaded = draw(pipe)
    pipe.fuse_lora()
    fused = draw(pipe)
    assert reduced(pipe)
    assert (
        float((fused - loaded).norm() / loaded.norm()) < 0.05 < float((fused - plain).norm() / plain.norm())
    )
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    assert float((draw(pipe) - plain).norm() / plain.norm()) < 0.05


def test_a_lora_in_the_place_of_a_merged_layer_is_refused_until_apply_is_called_again() -> None:
    """Flux's proj_mlp is a site of its own with modules="mlp", and peft puts another module in its place."""
    settings = {"where": "module", "modules": "mlp"}
    pipe = tomadiff.apply(make("flux"), **settings)
    plain = draw(pipe)
    pipe.load_lora_weights(dict(lora("flux")))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"tomadiff\.apply again"):
            draw(pipe)
    assert distance(draw(tomadiff.apply(pipe, **settings)), plain) > 1e-3
    pipe.unload_lora_weights()
    with pytest.raises(ConfigError, match=r"tomadiff\.apply again"):
        draw(pipe)
    assert torch.equal(draw(tomadiff.apply(pipe, **settings)), plain)


# -- other inputs ------------------------------------------------------------------------------------------


def controlled(name: str) -> DiffusionPipeline:
    """A pipeline with a ControlNet whose last layers are not zero, so that it has something to say."""
    pipe = make(name)
    model = denoiser(pipe)
    if name in ("sd1", "sdxl"):
        net = ControlNetModel.from_unet(model, conditioning_channels=3)
    elif name == "sd3":
        net = SD3ControlNetModel.from_transformer(model, num_layers=2, num_extra_conditioning_channels=0)
    else:  # whose widths are Flux.1's unless told otherwise
        width = {"attention_head_dim": 16, "num_attention_heads": 2}
        net = FluxControlNetModel.from_transformer(model, num_layers=2, num_single_layers=2, **width)
    for parameter in net.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    kinds = {
        "sd1": StableDiffusionControlNetPipeline,
        "sdxl": StableDiffusionXLControlNetPipeline,
        "sd3": StableDiffusion3ControlNetPipeline,
        "flux": FluxControlNetPipeline,
    }
    return remade(pipe, kinds[name], controlnet=net)


@pytest.mark.parametrize(("name", "how"), [*PAIRS, *FORECASTS])
def test_controlnet_pipelines_obey_their_control(name: str, how: str) -> None:
    pipe = controlled(name)
    control = "control_image" if name in ("sd3", "flux") else "image"

    def run(seed: int = 0) -> Tensor:
        size = {"height": 128, "width": 128}
        torch.manual_seed(0)  # SD3's encodes the control with noise that no generator can be given for
        call = prompt(pipe, num_inference_steps=steps(how))
        return pipe(**call, **{control: picture(seed)}, **size).images

    changed = check(pipe, run, **at(how))
    tomadiff.apply(pipe, **at(how))
    assert distance(run(1), changed) > 1e-4, "another control, another picture"


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("copied", [False, True], ids=["itself", "a copy"])
def test_a_controlnet_that_goes_on_or_off_on_the_way_starts_a_new_history(name: str, copied: bool) -> None:
    pipe = tomadiff.apply(controlled(name), interval=3)
    pipe = copy.deepcopy(pipe) if copied else pipe
    control = "control_image" if name in ("sd3", "flux") else "image"

    def run(**window: float) -> set[int]:
        size = {"height": 128, "width": 128, "num_inference_steps": 12}
        with steps_that_run(pipe) as ran:
            pipe(**prompt(pipe) | size, **{control: picture(0)}, **window)
        return set(ran)

    plain = run()
    assert plain == {0, 1, 3, 6, 8, 10, 11}
    assert run(control_guidance_end=0.5) - plain == {7}, "off in step 6, which is due; one output is too few"
    assert run(control_guidance_start=0.4) - plain == {5}
    tomadiff.remove(pipe)
    assert not pipe.controlnet._forward_pre_hooks


def test_a_controlnet_itself_is_not_merged_and_no_model_to_apply_to() -> None:
    pipe = controlled("sd1")
    tomadiff.apply(pipe)
    assert not any(hasattr(module, "_diffusers_hook") for module in pipe.controlnet.modules())
    with pytest.raises(tomadiff.errors.UnsupportedModelError):
        tomadiff.apply(pipe.controlnet)


def ip_adapter(pipe: DiffusionPipeline) -> dict[str, dict[str, Tensor]]:
    """Weights of an IP-Adapter that takes image embeddings of width 8, as its checkpoints name them."""
    model, generator = denoiser(pipe), torch.Generator().manual_seed(5)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 4

    projection = {"proj.weight": some(4 * WIDTH, 8), "proj.bias": some(4 * WIDTH)}
    projection |= {"norm.weight": torch.ones(WIDTH), "norm.bias": torch.zeros(WIDTH)}
    attention, unet = {}, hasattr(pipe, "unet")
    attended = "attn2.processor" if unet else ".attn.processor"
    names = [n for n in model.attn_processors if n.endswith(attended) and not n.startswith("single")]
    for number, name in enumerate(names):
        width = model.get_submodule(name.removesuffix(".processor")).to_q.in_features
        for part in ("to_k_ip", "to_v_ip"):
            key = f"{1 + 2 * number if unet else number}.{part}"
            attention |= {f"{key}.weight": some(width, WIDTH)} | (
                {} if unet else {f"{key}.bias": some(width)}
            )
    return {"image_proj": projection, "ip_adapter": attention}


def sd3_ip_adapter(pipe: DiffusionPipeline) -> dict[str, dict[str, Tensor]]:
    """The same for SD3, whose adapters know the time; their widths can't be less than these."""
    torch.manual_seed(5)
    projection = IPAdapterTimeImageProjection(8, 32, 64, depth=4, heads=1, num_queries=2, timestep_in_dim=16)
    attention = {
        f"{number}.{key}": value
        for number in range(len(pipe.transformer.attn_processors))
        for key, value in SD3IPAdapterJointAttnProcessor2_0(32, 32, 8, 64).state_dict().items()
    }
    return {"image_proj": projection.state_dict(), "ip_adapter": attention}


@pytest.mark.parametrize(("name", "how"), [*PAIRS, *FORECASTS])
def test_an_ip_adapter_acts_alike_before_and_after_apply(name: str, how: str) -> None:
    pipe = make(name)

    def load(pipe: DiffusionPipeline) -> None:
        weights = sd3_ip_adapter(pipe) if name == "sd3" else [ip_adapter(pipe)]
        denoiser(pipe)._load_ip_adapter_weights(weights)

    def run(pipe: DiffusionPipeline, seed: int = 0) -> Tensor:
        embeds = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(seed))
        if name == "flux":
            images = {"ip_adapter_image_embeds": [embeds], "negative_ip_adapter_image_embeds": [0 * embeds]}
        else:  # the negative ones first
            both = torch.cat([0 * embeds, embeds])
            images = {"ip_adapter_image_embeds": both if name == "sd3" else [both]}
        return draw(pipe, steps=steps(how), **images)

    load(pipe)
    check(pipe, lambda: run(pipe), **at(how))
    other = tomadiff.apply(make(name), **at(how))
    load(other)
    tomadiff.apply(pipe, **at(how))
    before, after = (torch.cat([run(each, seed) for seed in (0, 1, 2)]) for each in (pipe, other))
    assert mostly_alike(before, after)
    assert distance(after[0], after[1]) > 1e-4, "another image, another picture"


def ran_with(pipe: DiffusionPipeline, change: Callable[[dict[str, Tensor]], Any], **call: Any) -> set[int]:
    """Of twelve steps, those that run if something is changed at the end of step 4."""

    def turn(pipe: Any, step: int, time: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return (change(tensors) or {}) if step == 4 else {}

    with steps_that_run(pipe) as ran:
        draw(pipe, steps=12, callback_on_step_end=turn, **call)
    return set(ran)


UNCHANGED = {0, 3, 6, 8, 10, 11}


@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_another_scale_of_an_ip_adapter_on_the_way_starts_a_new_history(name: str) -> None:
    pipe = make(name)
    pipe.unet._load_ip_adapter_weights([ip_adapter(pipe)])
    tomadiff.apply(pipe, interval=3)
    images = {"ip_adapter_image_embeds": [torch.ones(2, 1, 8)]}
    assert ran_with(pipe, lambda _: pipe.set_ip_adapter_scale(1.0), **images) == UNCHANGED, "as it was"
    assert 5 in ran_with(pipe, lambda _: pipe.set_ip_adapter_scale(0.3), **images)


@pytest.mark.parametrize("change", [Tensor.clone, lambda tensor: tensor.add_(1)], ids=["new", "in place"])
@pytest.mark.parametrize("condition", ["add_text_embeds", "add_time_ids"])
def test_other_added_conditions_on_the_way_start_a_new_history(
    condition: str, change: Callable[[Tensor], Tensor]
) -> None:
    """SDXL's pooled text and sizes, which reach the model in a dict."""
    pipe = tomadiff.apply(make("sdxl"), interval=3)
    names = {"callback_on_step_end_tensor_inputs": [condition]}
    assert ran_with(pipe, lambda _: None, **names) == UNCHANGED
    assert 5 in ran_with(pipe, lambda tensors: {condition: change(tensors[condition])}, **names)


KINDS = {
    "img2img": {
        "sd1": StableDiffusionImg2ImgPipeline,
        "sdxl": StableDiffusionXLImg2ImgPipeline,
        "sd3": StableDiffusion3Img2ImgPipeline,
        "flux": FluxImg2ImgPipeline,
    },
    "inpaint": {
        "sd1": StableDiffusionInpaintPipeline,
        "sdxl": StableDiffusionXLInpaintPipeline,
        "sd3": StableDiffusion3InpaintPipeline,
        "flux": FluxInpaintPipeline,
    },
}


@pytest.mark.parametrize("how", ["span", "kv", "forecasts"])
@pytest.mark.parametrize("kind", KINDS)
def test_pictures_can_be_changed_and_filled_in(name: str, kind: str, how: str) -> None:
    pipe = make(name)
    if name == "sd3" and kind == "inpaint":  # takes no other channels than those of the real model
        pipe.transformer = SD3Transformer2DModel.from_config(
            pipe.transformer.config, in_channels=16, out_channels=16
        ).eval()
        pipe.vae = vae(16)
    pipe = remade(pipe, KINDS[kind][name])
    mask = {"mask_image": (picture(1, channels=1) > 0.5).float()} if kind == "inpaint" else {}
    size = {"height": 128, "width": 128} if kind == "inpaint" or name in ("sd3", "flux") else {}
    call = {"num_inference_steps": 2 * steps(how), "strength": 0.5, "image": picture()}
    check(pipe, lambda: pipe(**prompt(pipe, **call, **mask, **size)).images, **at(how))


def test_a_second_pass_at_a_higher_resolution_has_a_ratio_of_its_own() -> None:
    pipe = make("sd1")
    second = remade(pipe, StableDiffusionImg2ImgPipeline)
    image = picture(size=192)
    call = lambda: second(**prompt(second), image=image, strength=1.0).images  # noqa: E731
    alone = check(second, call)
    tomadiff.apply(pipe, ratio=0.25)
    first = draw(pipe)
    assert {site.kept / site.tokens for site in tomadiff.report(pipe).sites} == {0.75}
    tomadiff.apply(second, ratio=0.5)
    assert torch.equal(call(), alone), "the pass before leaves nothing behind"
    assert {site.kept / site.tokens for site in tomadiff.report(second).sites} == {0.5}
    assert tomadiff.report(second).sites[-1].tokens == 24 * 24
    assert torch.equal(draw(tomadiff.apply(pipe, ratio=0.25)), first)


def test_textual_inversion_changes_the_merged_picture_by_its_word(tmp_path: Path) -> None:
    words = ["<|startoftext|>", "<|endoftext|>", "a</w>", "cat</w>", "a", "c", "t</w>", "at</w>"]
    (tmp_path / "vocab.json").write_text(str({w: i for i, w in enumerate(words)}).replace("'", '"'))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na t</w>\nc at</w>\n")
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path, model_max_length=8)
    torch.manual_seed(0)
    encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=8,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
    pipe = remade(make("sd1"), StableDiffusionPipeline, tokenizer=tokenizer, text_encoder=encoder.eval())

    def run(words: str) -> Tensor:
        return draw(pipe, prompt=words, prompt_embeds=None, negative_prompt="a", negative_prompt_embeds=None)

    tomadiff.apply(pipe)
    before, cat = run("a <style>"), run("a cat")
    pipe.load_textual_inversion({"<style>": torch.ones(1, WIDTH)})
    assert distance(run("a <style>"), before) > 1e-4
    assert torch.equal(run("a cat"), cat)
    tomadiff.remove(pipe)
    check(pipe, lambda: run("a <style>"))


def test_views_of_a_wide_picture_are_forecast_each_from_its_own_outputs() -> None:
    """Where they don't overlap, they are pictures beside each other, as if drawn one by one."""
    pipe = make("sd1")
    wide = remade(pipe, StableDiffusionPanoramaPipeline)
    wide.get_views = functools.partial(wide.get_views, window_size=8, stride=8)
    noise = torch.cat([latents(pipe, seed, (64, 64)) for seed in (0, 1)], dim=-1)
    call = prompt(pipe, num_inference_steps=8, height=64)
    interval = [0, 1, 2, 4, 6, 7]

    def views() -> Tensor:
        return wide(**call, width=128, latents=noise).images

    dense = views()
    tomadiff.apply(wide, interval=interval)
    together = views()
    assert tomadiff.report(wide).model_calls == {"run": 12, "forecast": 4}
    assert distance(together, dense) > 1e-4
    tomadiff.remove(wide)
    assert torch.equal(views(), dense)
    tomadiff.apply(pipe, interval=interval)
    alone = [pipe(**call, width=64, latents=half.clone()).images for half in noise.chunk(2, dim=-1)]
    torch.testing.assert_close(together, torch.cat(alone, dim=-1), rtol=1e-3, atol=1e-3)


def test_models_that_take_turns_are_forecast_each_from_its_own_outputs() -> None:
    """Wan 2.2's: the first takes five of twelve steps, and the second begins midway."""
    first, second = build(wan), build(wan)
    pipe = remade(wan.pipeline(first), WanPipeline, transformer_2=second, boundary_ratio=0.6)
    call = {"num_inference_steps": 12, "output_type": "latent", "return_dict": False}
    run: Draw = lambda: pipe(**call, **wan.request((0,)))[0]  # noqa: E731
    dense = run()
    tomadiff.apply(pipe, interval=2)
    forecast = run()
    with steps_inside(first) as ran, steps_inside(second) as ran_after:
        assert torch.equal(run(), forecast)
    assert ran == {0, 2, 4} and ran_after == {0, 1, 2, 4, 5, 6}
    assert 1e-4 < distance(forecast, dense) < 0.2 * distance(dense, wan.request((0,))["latents"])
    tomadiff.remove(pipe)
    assert torch.equal(run(), dense)


# -- guidance and attention --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_freeu_acts_on_merged_models_and_comes_off(name: str) -> None:
    pipe = tomadiff.apply(make(name))
    plain = draw(pipe)
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    assert distance(draw(pipe), plain) > 1e-3
    tomadiff.remove(pipe)
    check(pipe, lambda: draw(pipe))
    pipe.disable_freeu()
    assert torch.equal(draw(tomadiff.apply(pipe)), plain)


def perturbed(name: str) -> DiffusionPipeline:
    kinds = {
        "sd1": StableDiffusionPAGPipeline,
        "sdxl": StableDiffusionXLPAGPipeline,
        "sd3": StableDiffusion3PAGPipeline,
    }
    layers = "transformer_blocks.(1|2)" if name == "sd3" else "mid"
    return remade(make(name), kinds[name], pag_applied_layers=layers)


@pytest.mark.parametrize(
    ("name", "where"), [("sd1", "span"), ("sd1", "block"), ("sdxl", "module"), ("sd3", "span")]
)
def test_perturbed_attention_guidance_guides_merged_pictures(name: str, where: str) -> None:
    pipe = perturbed(name)

    def run(scale: float = 3.0) -> Tensor:
        size = {"height": 128, "width": 128}
        return pipe(**prompt(pipe), **size, pag_scale=scale).images

    merged = check(pipe, run, **at(where))
    tomadiff.apply(pipe, **at(where))
    assert distance(run(1.0), merged) > 1e-4


@pytest.mark.parametrize("settings", [{"where": "kv"}, {"weigh_keys": True}], ids=str)
def test_perturbed_attention_takes_no_merged_keys_and_no_weights(settings: dict[str, Any]) -> None:
    """Its processors ignore the first and misread the second."""
    pipe = tomadiff.apply(perturbed("sd1"), **settings)
    with pytest.raises(ConfigError, match=r"PAG.*use where"):
        pipe(**prompt(pipe), height=128, width=128)


def test_self_attention_guidance_needs_its_layer_dense() -> None:
    """It lays an attention map of the middle block over the image."""
    pipe = remade(make("sd1"), StableDiffusionSAGPipeline)
    pipe.scheduler = DDIMScheduler()
    call = lambda: pipe(**prompt(pipe), height=128, width=128, sag_scale=1.0).images  # noqa: E731
    dense = call()
    tomadiff.apply(pipe)  # its steps can't be skipped either, since every one is recorded
    with pytest.warns(UserWarning, match="nothing is done here"):
        assert torch.equal(call(), dense)
    tomadiff.apply(pipe, ratio=0.5)
    with pytest.raises(ConfigError, match=r"CrossAttnStoreProcessor.*ratio for the other levels"):
        call()
    merged = (tomadiff.apply(pipe, ratio={1: 0.5}), call())[1]
    assert merged.isfinite().all() and distance(merged, dense) > 1e-4
    tomadiff.remove(pipe)
    assert torch.equal(call(), dense)


RECORDERS = {
    "LEDITSCrossAttnProcessor": (LEditsPPPipelineStableDiffusion, (lambda *_, **__: None, "mid", None, [])),
    "AttendExciteAttnProcessor": (StableDiffusionAttendAndExcitePipeline, (lambda *_: None, "mid")),
    "Pix2PixZeroAttnProcessor": (StableDiffusionPix2PixZeroPipeline, (True,)),
}


@pytest.mark.parametrize("processor", RECORDERS)
def test_other_recorded_attention_needs_every_step_and_its_layer_dense(processor: str) -> None:
    kind, arguments = RECORDERS[processor]
    pipe = make("sd1")
    block = pipe.unet.mid_block.attentions[0].transformer_blocks[0]
    block.attn2.set_processor(getattr(sys.modules[kind.__module__], processor)(*arguments))
    run: Draw = lambda: draw(pipe, steps=8)  # noqa: E731
    dense = run()
    tomadiff.apply(pipe, interval=2)
    assert torch.equal(run(), dense)
    report = tomadiff.report(pipe)
    assert report.steps == {"run": 8, "forecast": 0} and f"{processor} records attention" in report.why
    tomadiff.apply(pipe, ratio=0.5)
    with pytest.raises(ConfigError, match=rf"{processor}.*ratio for the other levels"):
        run()
    tomadiff.apply(pipe, ratio={1: 0.5})
    assert distance(run(), dense) > 1e-4
    tomadiff.remove(pipe)
    assert torch.equal(run(), dense)


def test_smoothed_energy_guidance_is_refused() -> None:
    """It blurs queries as a square picture."""
    model = tomadiff.apply(denoiser(make("sd3")), ratio=0.5)
    with torch.no_grad():
        model(**bare_call(model))
        _apply_smoothed_energy_guidance_hook(model, SmoothedEnergyGuidanceConfig([1]), 1.0)
        with pytest.raises(ConfigError, match="smoothed_energy_guidance"):
            model(**bare_call(model))


@pytest.mark.parametrize(
    ("name", "settings"), [("sd1", {"interval": 2, "ratio": 0.5}), ("sdxl", {}), ("sdxl", at("kv"))], ids=str
)
def test_guidance_may_end_on_the_way(name: str, settings: dict[str, Any]) -> None:
    """Then the batch is half as large from one step to the next, and neither plans nor outputs fit."""
    pipe = make(name)

    def end(pipe: DiffusionPipeline, step: int, time: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if step == 4:
            pipe._guidance_scale = 0.0
            return {key: tensor.chunk(2)[-1] for key, tensor in tensors.items()}
        return {}

    names = ["prompt_embeds"] + ["add_text_embeds", "add_time_ids"] * (name == "sdxl")
    call = {"steps": 10, "callback_on_step_end": end, "callback_on_step_end_tensor_inputs": names}
    check(pipe, lambda: draw(pipe, **call), **settings)


@pytest.mark.parametrize(("name", "where"), UNETS)
def test_attention_in_slices_gives_the_same_picture(name: str, where: str) -> None:
    pipe = tomadiff.apply(make(name), **at(where))
    seeds = (0, 1, 2)
    whole = draw(pipe, seeds)
    pipe.enable_attention_slicing(1)
    assert mostly_alike(draw(pipe, seeds), whole)
    assert reduced(pipe)
    tomadiff.remove(pipe)
    check(pipe, lambda: draw(pipe), **at(where))


@pytest.mark.parametrize(("name", "where"), PAIRS)
def test_attention_backends_can_be_chosen(name: str, where: str) -> None:
    pipe = make(name)
    seeds = (0, 1, 2)
    tomadiff.apply(pipe, **at(where))
    default = draw(pipe, seeds)
    with attention_backend():  # set_attention_backend changes that of the whole process, too
        denoiser(pipe).set_attention_backend("_native_math")
    assert mostly_alike(draw(pipe, seeds), default)
    assert reduced(pipe)
    tomadiff.remove(pipe)
    check(pipe, lambda: draw(pipe), **at(where))


# -- offloading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(("name", "where"), PAIRS)
def test_models_are_offloaded_layer_by_layer(name: str, order: str, where: str) -> None:
    """The hooks of sequential offloading, from memory to memory; between calls, no layer has its weights."""
    model = denoiser(make(name))
    call = bare_call(model)
    with torch.no_grad():
        dense = model(**call)[0]
        merged = tomadiff.apply(model, **at(where))(**call)[0]
        tomadiff.remove(model)
        if order == "after":
            tomadiff.apply(model, **at(where))
        accelerate.cpu_offload(model, torch.device("cpu"))
        if order == "before":
            tomadiff.apply(model, **at(where))
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert torch.equal(model(**call)[0], merged) and reduced(model)
        assert torch.equal(tomadiff.remove(model)(**call)[0], dense)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("settings", [{}, {"ratio": 0.5, "where": "kv", "weigh_keys": True}], ids=str)
def test_models_are_offloaded_as_a_whole(
    pipe: DiffusionPipeline, order: str, settings: dict[str, Any]
) -> None:
    dense = draw(pipe)
    merged = draw(tomadiff.apply(pipe, **settings))
    tomadiff.remove(pipe)
    if order == "after":
        tomadiff.apply(pipe, **settings)
    pipe.enable_model_cpu_offload(device="cpu")  # without a GPU, from memory to memory
    if order == "before":
        tomadiff.apply(pipe, **settings)
    for _ in range(2):  # its hooks are made anew after each generation
        assert torch.equal(draw(pipe), merged)
    assert reduced(pipe)
    assert torch.equal(draw(tomadiff.remove(pipe)), dense)


@pytest.mark.parametrize(
    ("name", "order"), [("sd1", "before"), ("sdxl", "after"), ("sd3", "before"), ("flux", "after")]
)
def test_skipped_steps_of_models_that_are_offloaded_layer_by_layer_load_nothing(
    name: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, cpu = make(name), torch.device("cpu")
    monkeypatch.setattr(type(pipe), "_execution_device", cpu)  # the pipeline takes it for meta
    run: Draw = lambda: draw(pipe, steps=8)  # noqa: E731
    dense = run()
    expected = (tomadiff.apply(pipe, interval=2), run())[1]
    if order == "before":
        tomadiff.remove(pipe)
    accelerate.cpu_offload(denoiser(pipe), cpu)
    if order == "before":
        tomadiff.apply(pipe, interval=2)
    assert torch.equal(drawn(pipe, run, {"interval": 2}), expected)
    tomadiff.remove(pipe)
    assert torch.equal(run(), dense)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
@pytest.mark.parametrize("how", ["span", "kv", "forecasts"])
@pytest.mark.parametrize("name", ["sd1", "flux"])
def test_models_are_offloaded_in_groups(name: str, how: str, level: str, order: str) -> None:
    """Where its hooks are on the same blocks as ours, each is merged on its own, as with where="block"."""
    pipe = make(name)
    run: Draw = lambda: draw(pipe, steps=steps(how))  # noqa: E731
    cpu = torch.device("cpu")
    offload = {"onload_device": cpu, "offload_device": cpu, "offload_type": level}
    offload |= {"num_blocks_per_group": 1} if level == "block_level" else {}
    alone = (name, how, level) == ("flux", "span", "block_level")
    dense = run()
    expected = (tomadiff.apply(pipe, **at("block" if alone else how)), run())[1]
    tomadiff.remove(pipe)
    if order == "after":
        tomadiff.apply(pipe, **at(how))
    denoiser(pipe).enable_group_offload(**offload)
    if order == "before":
        tomadiff.apply(pipe, **at(how))
    assert torch.equal(drawn(pipe, run, at(how)), expected)
    tomadiff.remove(pipe)
    assert torch.equal(run(), dense)


# -- caches ------------------------------------------------------------------------------------------------


def caches() -> list[Any]:
    """That skip all that they can, in generations of four steps."""
    mag = {"mag_ratios": [1.0] * 4, "num_inference_steps": 4, "retention_ratio": 0.0, "threshold": 1e9}
    return [FirstBlockCacheConfig(threshold=1e9), MagCacheConfig(**mag, max_skip_steps=2)]


@pytest.mark.parametrize("where", ["span", "kv"])
@pytest.mark.parametrize("cache", caches(), ids=lambda cache: type(cache).__name__)
def test_a_cache_around_blocks_goes_on_and_off_in_any_order(cache: Any, where: str) -> None:
    pipe = make("flux")
    model = pipe.transformer
    run: Draw = lambda: draw(pipe, steps=4)  # noqa: E731
    dense = run()
    tomadiff.apply(pipe, **at(where))
    merged = run()
    tomadiff.remove(pipe)
    model.enable_cache(cache)
    cached = run()
    assert distance(cached, dense) > 1e-4
    tomadiff.apply(pipe, **at(where))
    if where == "kv":  # inside blocks, so that caches around them are outside in either order
        before = run()
    else:
        with pytest.raises(ConfigError, match=r"enable_cache\(\) after it"):
            run()
    model.disable_cache()
    assert torch.equal(run(), merged), "merging survives the cache"
    model.enable_cache(cache)
    both = run()
    assert where != "kv" or torch.equal(both, before)
    assert both.isfinite().all() and reduced(pipe)
    assert min(distance(both, other) for other in (dense, cached, merged)) > 1e-4
    model.disable_cache()
    assert torch.equal(run(), merged)
    model.enable_cache(cache)
    tomadiff.remove(pipe)
    assert torch.equal(run(), cached), "the cache survives merging"
    model.disable_cache()
    assert torch.equal(run(), dense)


def test_caches_that_were_put_on_by_hand_are_refused_alike() -> None:
    """These functions of diffusers tell the model nothing."""
    pipe = make("flux")
    apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(ConfigError, match=r"enable_cache\(\) after it"):
        draw(tomadiff.apply(pipe, ratio=0.5))
    for name in ("sd1", "flux"):
        pipe = tomadiff.apply(make(name), ratio=0.5)
        broadcast = PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
        )
        broadcast.spatial_attention_block_identifiers += ("down_blocks",)
        apply_pyramid_attention_broadcast(denoiser(pipe), broadcast)
        with pytest.raises(ConfigError, match=r"pyramid_attention_broadcast.*tomadiff\.remove"):
            draw(pipe)


@pytest.mark.parametrize(("name", "where"), UNETS)
def test_deepcache_goes_on_and_off_in_any_order(name: str, where: str) -> None:
    """In the steps between, it leaves out the inner blocks of a UNet, with all that is merged in them."""
    pipe = make(name)
    run: Draw = lambda: draw(pipe, steps=4)  # noqa: E731
    dense = run()
    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=2, cache_branch_id=0)
    helper.enable()
    cached = run()
    both = check(pipe, run, **at(where))
    helper.disable()
    merged = check(pipe, run, **at(where))
    tomadiff.apply(pipe, **at(where))
    helper.enable()
    assert torch.equal(run(), both), "in either order"
    assert min(distance(both, other) for other in (dense, cached, merged)) > 1e-4
    helper.disable()
    assert torch.equal(run(), merged)


@contextmanager
def cached_by_cache_dit(pipe: DiffusionPipeline) -> Iterator[None]:
    """After the first step, everything but the first block of each kind comes from the cache."""
    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=1, residual_diff_threshold=1e9
    )
    cache_dit.enable_cache(pipe, cache_config=config)
    try:
        yield
    finally:
        cache_dit.disable_cache(pipe)  # it is on the class of the pipeline


@pytest.mark.parametrize(("name", "where"), [pair for pair in PAIRS if pair[0] in ("sd3", "flux")])
def test_cache_dit_goes_on_and_off_in_any_order(name: str, where: str) -> None:
    pipe = make(name)
    run: Draw = lambda: draw(pipe, steps=4)  # noqa: E731
    dense = run()
    with cached_by_cache_dit(pipe):
        cached = run()
        both = check(pipe, run, **at(where))
        if where == "span":  # what it looks at after the first block has to be whole
            assert torch.equal(check(pipe, run, where="block"), both)
    merged = check(pipe, run, **at(where))
    tomadiff.apply(pipe, **at(where))
    with cached_by_cache_dit(pipe):
        assert torch.equal(run(), both), "in either order"
    assert min(distance(both, other) for other in (dense, cached, merged)) > 1e-4
    assert torch.equal(run(), merged)


def test_auto_does_not_measure_beside_cache_dit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOMADIFF_CACHE", str(tmp_path))
    pipe = tomadiff.apply(make("flux"), ratio="auto")
    with cached_by_cache_dit(pipe), pytest.raises(ConfigError, match="measure beside a cache"):
        draw(pipe)


# -- quantised weights -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def torchao() -> Path:
    """In a folder of its own: where it is installed, diffusers imports it, and every import says a lot."""
    folder = Path.home() / ".cache" / "tomadiff-tests" / "torchao-0.18.0"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
            subprocess.run([*pip, f"{partial}/whole", "torchao==0.18.0"], check=True)
            Path(f"{partial}/whole").rename(folder)
    return folder


def test_quantised_linear_layers(torchao: Path) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "quantised.py",
            "composition/quantised_forecasts.py",
        ],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONPATH": f"{torchao}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


# -- schedulers --------------------------------------------------------------------------------------------

SCHEDULERS = {
    "LCM": (LCMScheduler, {}, 4),
    "Euler in 4 steps": (EulerDiscreteScheduler, {"timestep_spacing": "trailing"}, 4),
    "Heun": (HeunDiscreteScheduler, {}, 3),
    "v-prediction": (DDIMScheduler, {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}, 4),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_of_few_steps_of_second_order_and_of_other_predictions(scheduler: str) -> None:
    pipe = make("sd1")
    kind, settings, steps = SCHEDULERS[scheduler]
    pipe.scheduler = kind(**settings)
    call = {"steps": steps, "guidance": 1.0 if kind is LCMScheduler else 3.0}
    check(pipe, lambda: draw(pipe, **call, generator=torch.Generator().manual_seed(0)))


# -- gradients ---------------------------------------------------------------------------------------------


def test_a_loss_on_the_picture_moves_the_latents_of_a_merged_model(name: str) -> None:
    """As guidance by another model does: gradients for the input, of a model that is not trained."""
    model = tomadiff.apply(denoiser(make(name)).requires_grad_(False), ratio=0.5)
    call = bare_call(model)
    argument = "sample" if "sample" in call else "hidden_states"
    call[argument].requires_grad_()
    loss = model(**call)[0].square().mean()
    loss.backward()
    gradient = call[argument].grad
    assert reduced(model) and gradient.isfinite().all() and gradient.any()
    with torch.no_grad():
        call[argument] -= gradient / gradient.norm()
        assert model(**call)[0].square().mean() < loss


def test_a_lora_is_trained_on_merged_tokens(name: str) -> None:
    model = denoiser(make(name)).requires_grad_(False).train()
    tomadiff.apply(model, ratio=0.5)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.Adam(trained, lr=0.01)
    losses = []
    for _ in range(5):
        loss = model(**bare_call(model))[0].square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert reduced(model) and losses[-1] < losses[0]
