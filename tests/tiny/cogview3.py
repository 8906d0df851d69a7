from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import noise, text, times
from torch import nn

MODEL = "CogView3PlusTransformer2DModel"
SETTINGS = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "text_embed_dim": 32,
    "time_embed_dim": 16,
    "condition_dim": 8,
    "pos_embed_max_size": 16,
    "sample_size": 16,
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    size = torch.tensor([[128.0, 128.0]]).expand(len(seeds), -1)
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros(len(seeds), 2),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    return diffusers.CogView3PlusPipeline(
        transformer=model, scheduler=diffusers.CogVideoXDDIMScheduler(), **parts
    )


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 32),
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 32),
        "latents": noise(seeds, 4, 16, 16),
        "height": 128,
        "width": 128,
    }
