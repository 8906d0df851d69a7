from __future__ import annotations

import math
from typing import Any

import diffusers
from seeded import noise, text, times
from torch import nn

MODEL = "QwenImageTransformer2DModel"
SETTINGS = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, math.prod(grid), 16),
        "timestep": times(seeds, time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "img_shapes": [[(1, *grid)]] * len(seeds),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return diffusers.QwenImagePipeline(transformer=model, scheduler=scheduler, **parts)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 32),
        "negative_prompt_embeds": text((9,) * len(seeds), 5, 32),
        "latents": noise(seeds, 64, 16),
        "height": 128,
        "width": 128,
    }
