from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import noise, text, times
from torch import nn

MODEL = "SanaTransformer2DModel"
SETTINGS = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 32,
    "sample_size": 8,
    "patch_size": 1,
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, 4, *grid),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "encoder_attention_mask": (torch.arange(7) < 5).expand(len(seeds), -1),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.SanaPipeline(transformer=model, scheduler=scheduler, **parts)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 32),
        "prompt_attention_mask": torch.ones(len(seeds), 7),
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 32),
        "negative_prompt_attention_mask": torch.ones(len(seeds), 7),
        "latents": noise(seeds, 4, 8, 8),
        "height": 256,
        "width": 256,
        "negative_prompt": None,
        "use_resolution_binning": False,
    }
