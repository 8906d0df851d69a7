"""Motif-Video with a decoder, and cross-attention in its blocks."""

from __future__ import annotations

from typing import Any

from seeded import noise, text, times
from torch import nn

MODEL = "MotifVideoTransformer3DModel"
SETTINGS = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 1,
    "num_single_layers": 2,
    "num_decoder_layers": 1,
    "enable_text_cross_attention_dual": True,
    "enable_text_cross_attention_single": True,
    "text_embed_dim": 16,
    "rope_axes_dim": (4, 4, 4),
}
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    frames, height, width = grid
    mask = times(seeds, 1.0)[:, None].repeat(1, 7)
    mask[:, 5:] = 0
    return {
        "hidden_states": noise(seeds, 4, frames, 2 * height, 2 * width),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 16),
        "encoder_attention_mask": mask,
    }
