"""Cosmos with learned positions and a timestep for each frame."""

from __future__ import annotations

from typing import Any

from seeded import noise, text, times
from torch import nn

MODEL = "CosmosTransformer3DModel"
SETTINGS = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "text_embed_dim": 16,
    "adaln_lora_dim": 4,
    "max_size": (4, 32, 32),
    "concat_padding_mask": False,
}
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    frames, height, width = grid
    steps = times(seeds, time).reshape(-1, 1, 1, 1, 1).repeat(1, 1, frames, 1, 1)
    steps[:, :, 0] = 0  # a frame that is given
    return {
        "hidden_states": noise(seeds, 4, frames, 2 * height, 2 * width),
        "timestep": steps,
        "encoder_hidden_states": text(seeds, 7, 16),
        "fps": 24,
    }
