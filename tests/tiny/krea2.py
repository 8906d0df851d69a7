"""With padded text, which a mask leaves out."""

from __future__ import annotations

import math
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from seeded import bare_pipeline, noise, positions, text, times
from torch import nn

MODEL = "Krea2Transformer2DModel"
SETTINGS = {
    "in_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "timestep_embed_dim": 16,
    "text_hidden_dim": 32,
    "num_text_layers": 2,
    "text_num_attention_heads": 2,
    "text_num_key_value_heads": 2,
    "text_intermediate_size": 64,
    "num_layerwise_text_blocks": 1,
    "num_refiner_text_blocks": 1,
    "axes_dims_rope": (4, 6, 6),
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    lengths = torch.tensor([[3 + seed] for seed in seeds])
    return {
        "hidden_states": noise(seeds, math.prod(grid), 16),
        "timestep": times(seeds, time),
        "encoder_hidden_states": text(seeds, 7, 2, 32),
        "encoder_attention_mask": torch.arange(7) < lengths,
        "position_ids": F.pad(positions(*grid), (1, 0, 7, 0)),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("Krea2Pipeline", model)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 2, 32),
        "prompt_embeds_mask": torch.ones(len(seeds), 7, dtype=torch.bool),
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 2, 32),
        "negative_prompt_embeds_mask": torch.ones(len(seeds), 7, dtype=torch.bool),
        "latents": noise(seeds, 64, 16),
        "height": 128,
        "width": 128,
    }
