from __future__ import annotations

import math
from typing import Any

import torch
from seeded import noise, text, times
from torch import nn

MODEL = "GlmImageTransformer2DModel"
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
    "prior_vq_quantizer_codebook_size": 16,
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    size = torch.tensor([[128.0, 128.0]]).expand(len(seeds), -1)
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "prior_token_id": (noise(seeds, math.prod(grid)) * 5).long() % 16,
        "prior_token_drop": torch.zeros(len(seeds), math.prod(grid), dtype=torch.bool),
        "target_size": size,
        "crop_coords": torch.zeros(len(seeds), 2),
    }
