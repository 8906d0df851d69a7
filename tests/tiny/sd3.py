"""Stable Diffusion 3.5-medium's shape: the first block attends twice, the last drops its text."""

from __future__ import annotations

from typing import Any

from seeded import noise, text, times
from torch import nn

MODEL = "SD3Transformer2DModel"
SETTINGS = {
    "sample_size": 32,
    "patch_size": 2,
    "in_channels": 8,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 32,
    "out_channels": 8,
    "pos_embed_max_size": 128,
    "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, 8, *(2 * side for side in grid)),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "pooled_projections": text(seeds, 32),
    }
