"""The prior's shape: two stages of one resolution."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import bare_pipeline, noise, text, times
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

MODEL = "StableCascadeUNet"
SETTINGS = {
    "in_channels": 4,
    "out_channels": 4,
    "timestep_ratio_embedding_dim": 8,
    "patch_size": 1,
    "conditioning_dim": 32,
    "block_out_channels": (32, 32),
    "num_attention_heads": (2, 2),
    "down_num_layers_per_block": (1, 1),
    "up_num_layers_per_block": (1, 1),
    "down_blocks_repeat_mappers": (1, 1),
    "up_blocks_repeat_mappers": (1, 1),
    "block_types_per_layer": (
        ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
        ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
    ),
    "clip_text_in_channels": 32,
    "clip_text_pooled_in_channels": 32,
    "clip_image_in_channels": 32,
    "clip_seq": 2,
    "self_attn": True,
    "switch_level": (False,),
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "sample": noise(seeds, 4, *grid),
        "timestep_ratio": times(seeds, time),
        "clip_text_pooled": text(seeds, 1, 32),
        "clip_text": text(seeds, 7, 32),
        "clip_img": text(seeds, 1, 32),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    # the pipeline asks its text encoder for a dtype, though the text comes encoded
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 8}
    text_encoder = CLIPTextModelWithProjection(CLIPTextConfig(num_attention_heads=2, **sizes))
    scheduler = diffusers.DDPMWuerstchenScheduler()
    return bare_pipeline("StableCascadePriorPipeline", model, scheduler, text_encoder=text_encoder)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    negative = (9,) * len(seeds)
    return {
        "prompt_embeds": text(seeds, 7, 32),
        "prompt_embeds_pooled": text(seeds, 1, 32),
        "negative_prompt_embeds": text(negative, 7, 32),
        "negative_prompt_embeds_pooled": text(negative, 1, 32),
        "latents": noise(seeds, 4, 8, 8),
        "generator": torch.Generator().manual_seed(0),
        "height": 341,
        "width": 341,
        "output_type": "pt",
    }
