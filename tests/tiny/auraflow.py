from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import noise, text, times
from torch import nn

MODEL = "AuraFlowTransformer2DModel"
SETTINGS = {
    "sample_size": 32,
    "patch_size": 2,
    "in_channels": 4,
    "num_mmdit_layers": 2,
    "num_single_dit_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "out_channels": 4,
    "pos_embed_max_size": 1024,
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep": times(seeds, time),
        "encoder_hidden_states": text(seeds, 7, 32),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.AuraFlowPipeline(transformer=model, scheduler=scheduler, **parts)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 32),
        "prompt_attention_mask": torch.ones(len(seeds), 7),
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 32),
        "negative_prompt_attention_mask": torch.ones(len(seeds), 7),
        "latents": noise(seeds, 4, 16, 16),
        "height": 128,
        "width": 128,
    }
