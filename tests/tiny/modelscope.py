from __future__ import annotations

from typing import Any

from seeded import noise, text, times
from torch import nn

MODEL = "UNet3DConditionModel"
SETTINGS = {
    "sample_size": 8,
    "block_out_channels": (16,),
    "down_block_types": ("CrossAttnDownBlock3D",),
    "up_block_types": ("CrossAttnUpBlock3D",),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 16,
    "attention_head_dim": 8,
}
GRID = (8, 8)  # of each frame


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "sample": noise(seeds, 4, 2, *grid),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 16),
    }
