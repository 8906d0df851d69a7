"""Six blocks, of which the last two take a skip from the first two."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from seeded import noise, text, times
from torch import nn

MODEL = "HunyuanDiT2DModel"
SETTINGS = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 16,
    "hidden_size": 32,
    "num_layers": 6,
    "mlp_ratio": 4.0,
    "cross_attention_dim": 32,
    "cross_attention_dim_t5": 32,
    "pooled_projection_dim": 32,
    "text_len": 5,
    "text_len_t5": 7,
    "use_style_cond_and_image_meta_size": False,
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 5, 32),
        "text_embedding_mask": torch.ones(len(seeds), 5),
        "encoder_hidden_states_t5": text(seeds, 7, 32),
        "text_embedding_mask_t5": torch.ones(len(seeds), 7),
        "image_rotary_emb": get_2d_rotary_pos_embed(16, ((0, 0), grid), grid, output_type="pt"),
    }
