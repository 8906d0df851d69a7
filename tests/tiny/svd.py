from __future__ import annotations

from typing import Any

from seeded import noise, text, times
from torch import nn

MODEL = "UNetSpatioTemporalConditionModel"
SETTINGS = {
    "sample_size": 8,
    "in_channels": 8,
    "block_out_channels": (64,),
    "down_block_types": ("CrossAttnDownBlockSpatioTemporal",),
    "up_block_types": ("CrossAttnUpBlockSpatioTemporal",),
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "transformer_layers_per_block": 2,
    "num_attention_heads": 2,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 24,
    "num_frames": 2,
}
GRID = (8, 8)  # of each frame


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "sample": noise(seeds, 2, 8, *grid),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 1, 16),
        "added_time_ids": times(seeds, 1.0)[:, None].expand(-1, 3),
    }
