"""Tiny pipelines of real diffusers classes with random weights, called without text encoders."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

WIDTH = 32  # of the text embeddings


def vae(latent_channels: int = 4) -> AutoencoderKL:
    """Three downsamplings, so that 64 x 64 pixels are 8 x 8 latents as in the real models."""
    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=0,  # between them; diffusers looks at every module in each call of a pipeline
        mid_block_add_attention=False,
        norm_num_groups=4,
        latent_channels=latent_channels,
        shift_factor=0.0,
        sample_size=64,
    )


def sd1() -> StableDiffusionPipeline:
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=2,
        cross_attention_dim=WIDTH,
    )
    parts = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    return StableDiffusionPipeline(
        vae=vae(),
        unet=unet,
        scheduler=EulerDiscreteScheduler(steps_offset=1),
        requires_safety_checker=False,
        **parts,
    )


def sdxl() -> StableDiffusionXLPipeline:
    """As in SDXL, the finest level has no attention and the coarsest has the most blocks."""
    unet = UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(16, 16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=(2, 2, 4),
        transformer_layers_per_block=(1, 1, 2),
        use_linear_projection=True,
        cross_attention_dim=WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=WIDTH + 6 * 8,
    )
    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    return StableDiffusionXLPipeline(
        vae=vae(), unet=unet, scheduler=EulerDiscreteScheduler(), add_watermarker=False, **parts
    )


def sd3() -> StableDiffusion3Pipeline:
    """As in 3.5-medium, some blocks attend twice; the last drops its text."""
    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=8,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=WIDTH,
        out_channels=8,
        pos_embed_max_size=128,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    parts = dict.fromkeys(
        ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
    )
    return StableDiffusion3Pipeline(
        vae=vae(8), transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), **parts
    )


def flux() -> FluxPipeline:
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    return FluxPipeline(
        vae=vae(), transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), **parts
    )


MAKERS: dict[str, Callable[[], DiffusionPipeline]] = {"sd1": sd1, "sdxl": sdxl, "sd3": sd3, "flux": flux}


def every_pipeline_with(settings: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Names and settings. SD3 takes no mask, by which keys are weighed, but where only keys are merged."""
    return [
        (name, chosen)
        for name in MAKERS
        for chosen in settings
        if name != "sd3" or "weigh_keys" not in chosen or chosen.get("where") == "kv"
    ]


def make(name: str) -> DiffusionPipeline:
    torch.manual_seed(0)
    pipe = MAKERS[name]()
    denoiser(pipe).eval()  # as from_pretrained leaves it
    pipe.set_progress_bar_config(disable=True)
    return pipe


def shallow(name: str) -> DiffusionPipeline:
    """With a block of each kind, or at the finest level alone: for tests that compile them."""
    pipe = make(name)
    if name == "flux":
        del pipe.transformer.transformer_blocks[1:], pipe.transformer.single_transformer_blocks[1:]
        return pipe
    assert name == "sd1"
    one_level = {
        "block_out_channels": (16,),
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("CrossAttnUpBlock2D",),
        "mid_block_type": None,
    }
    torch.manual_seed(0)
    pipe.unet = UNet2DConditionModel.from_config({**pipe.unet.config, **one_level}).eval()
    return pipe


def denoiser(pipe: DiffusionPipeline) -> torch.nn.Module:
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


@contextmanager
def steps_that_run(pipe: DiffusionPipeline) -> Iterator[list[int]]:
    """The step of each call in which the model of a patched pipeline runs."""
    ran: list[int] = []
    clock = denoiser(pipe)._tomadiff.clock
    handle = denoiser(pipe).register_forward_pre_hook(lambda *_: ran.append(clock.step))
    yield ran
    handle.remove()


def latents(pipe: DiffusionPipeline, seed: int, size: tuple[int, int]) -> Tensor:
    """Initial noise of one sample, [1, C, h, w]; Flux takes it packed, [1, N, 4 * C]."""
    channels = denoiser(pipe).config.in_channels // (4 if isinstance(pipe, FluxPipeline) else 1)
    noise = torch.randn(
        1, channels, size[0] // 8, size[1] // 8, generator=torch.Generator().manual_seed(seed)
    )
    if not isinstance(pipe, FluxPipeline):
        return noise
    return FluxPipeline._pack_latents(noise, 1, channels, size[0] // 8, size[1] // 8)


def text(seed: int, tokens: int = 7) -> tuple[Tensor, Tensor]:
    """Embeddings of a made-up prompt: the sequence, [1, T, C], and the pooled one, [1, C]."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(1, tokens, WIDTH, generator=generator), torch.randn(1, WIDTH, generator=generator)


def draw(
    pipe: DiffusionPipeline,
    seeds: tuple[int, ...] = (0,),
    size: tuple[int, int] = (128, 128),
    steps: int = 2,
    guidance: float = 3.0,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Tensor:
    """Latents of the prompts with these seeds, by the pipeline's real call; `output_type="pt"` for images."""
    embeds, pooled = (torch.cat(parts) for parts in zip(*(text(seed) for seed in seeds)))
    negative, negative_pooled = (part.expand(len(seeds), *part.shape[1:]) for part in text(999))
    call: dict[str, Any] = {"prompt_embeds": embeds, "negative_prompt_embeds": negative}
    if not isinstance(pipe, StableDiffusionPipeline):
        call |= {"pooled_prompt_embeds": pooled, "negative_pooled_prompt_embeds": negative_pooled}
    if isinstance(pipe, FluxPipeline):  # guidance there is a second call of the model in each step
        call |= {"true_cfg_scale": guidance}
    else:
        call |= {"guidance_scale": guidance}
    call |= {
        "latents": torch.cat([latents(pipe, seed, size) for seed in seeds]),
        "height": size[0],
        "width": size[1],
        "num_inference_steps": steps,
        "output_type": "latent",  # decoding is no business of ours
    }
    call = {key: value.to(dtype) if isinstance(value, Tensor) else value for key, value in call.items()}
    return pipe(**{**call, **more}).images


def bare_call(model: torch.nn.Module) -> dict[str, Any]:
    """Arguments for a model alone, on 8 x 8 tokens (16 x 16 at the finest level of a UNet)."""
    embeds, pooled = text(0)
    generator = torch.Generator().manual_seed(1)
    call = {"encoder_hidden_states": embeds, "timestep": torch.tensor([500.0]), "return_dict": False}
    if type(model).__name__ == "UNet2DConditionModel":
        added = {"text_embeds": pooled, "time_ids": torch.ones(1, 6)}
        return call | {"sample": torch.randn(1, 4, 16, 16, generator=generator), "added_cond_kwargs": added}
    call["pooled_projections"] = pooled
    if type(model).__name__ == "SD3Transformer2DModel":
        return call | {"hidden_states": torch.randn(1, 8, 16, 16, generator=generator)}
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    ids = torch.stack([torch.zeros(64), rows.flatten(), columns.flatten()], dim=-1)
    noise = torch.randn(1, 64, 16, generator=generator)
    call |= {"hidden_states": noise, "img_ids": ids, "txt_ids": torch.zeros(7, 3)}
    return call | {"timestep": torch.tensor([0.5])}  # Flux counts from 0 to 1


def whole_pipeline(folder: Path) -> Path:
    """A Stable Diffusion pipeline with a tiny text encoder of its own, saved as users save theirs."""
    letters = string.ascii_lowercase
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
    )
    parts = make("sd1").components | {"tokenizer": tokenizer, "text_encoder": CLIPTextModel(config)}
    StableDiffusionPipeline(**parts, requires_safety_checker=False).save_pretrained(folder / "pipe")
    return folder / "pipe"
