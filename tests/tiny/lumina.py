from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina
from seeded import bare_pipeline, noise, text, times
from torch import nn

MODEL = "LuminaNextDiT2DModel"
SETTINGS = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "multiple_of": 16,
    "cross_attention_dim": 32,
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    lengths = torch.tensor([[3 + seed] for seed in seeds])
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep": times(seeds, 1 - time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "encoder_mask": torch.arange(7) < lengths,
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(16, 16, 16),
        "cross_attention_kwargs": {},
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("LuminaPipeline", model)


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
