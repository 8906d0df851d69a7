"""Blocks without self-attention at the finest level."""

from __future__ import annotations

from typing import Any

from seeded import noise, text, times
from torch import nn

MODEL = "DreamLiteUNetModel"
SETTINGS = {
    "sample_size": 16,
    "block_out_channels": (16, 32),
    "down_block_types": ("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
    "up_block_types": ("DreamLiteCrossAttnUpBlock2D", "DreamLiteCrossAttnNoSelfAttnUpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
}
GRID = (16, 16)
LEVELS = (1, 2)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "sample": noise(seeds, 4, *grid),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 32),
    }
