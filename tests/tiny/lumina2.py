from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import noise, text, times
from torch import nn

MODEL = "Lumina2Transformer2DModel"
SETTINGS = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 32,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "multiple_of": 16,
    "axes_dim_rope": (4, 6, 6),
    "axes_lens": (64, 64, 64),
    "cap_feat_dim": 32,
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep": times(seeds, 1 - time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "encoder_attention_mask": (torch.arange(7) < 5).expand(len(seeds), -1),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.Lumina2Pipeline(transformer=model, scheduler=scheduler, **parts)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 32),
        "prompt_attention_mask": torch.ones(len(seeds), 7, dtype=torch.long),
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 32),
        "negative_prompt_attention_mask": torch.ones(len(seeds), 7, dtype=torch.long),
        "latents": noise(seeds, 4, 16, 16),
        "height": 128,
        "width": 128,
    }
