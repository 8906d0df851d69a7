"""A reference and the picture, which comes last and goes first."""

from __future__ import annotations

from typing import Any

from seeded import noise, text, times
from torch import nn

MODEL = "JoyImageEditTransformer3DModel"
SETTINGS = {
    "patch_size": [1, 2, 2],
    "in_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": 32,
    "num_layers": 2,
    "rope_dim_list": [4, 6, 6],
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, 2, 4, 1, *(2 * side for side in grid)),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 32),
    }
