"""SDXL's shape: no attention at the finest level, the most blocks at the coarsest."""

from __future__ import annotations

from typing import Any

from seeded import noise, text, times
from torch import nn

MODEL = "UNet2DConditionModel"
SETTINGS = {
    "sample_size": 32,
    "block_out_channels": (16, 16, 32),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": (2, 2, 4),
    "transformer_layers_per_block": (1, 1, 2),
    "use_linear_projection": True,
    "cross_attention_dim": 32,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 32 + 6 * 8,
}
GRID = (16, 16)
LEVELS = (2, 4)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "sample": noise(seeds, 4, *grid),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "added_cond_kwargs": {
            "text_embeds": text(seeds, 32),
            "time_ids": times(seeds, 1.0)[:, None].expand(-1, 6),
        },
    }
