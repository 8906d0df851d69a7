from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from seeded import noise, positions, text, times
from torch import nn

MODEL = "FluxTransformer2DModel"
SETTINGS = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, math.prod(grid), 16),
        "timestep": times(seeds, time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "pooled_projections": text(seeds, 32),
        "img_ids": F.pad(positions(*grid), (1, 0)),
        "txt_ids": torch.zeros(7, 3),
    }


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    """Of pipelines built on this model."""
    return {
        "prompt_embeds": text(seeds, 7, 32),
        "pooled_prompt_embeds": text(seeds, 32),
        "latents": noise(seeds, 64, 16),
        "height": 128,
        "width": 128,
    }
