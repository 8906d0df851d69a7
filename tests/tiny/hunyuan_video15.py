from __future__ import annotations

from typing import Any

from seeded import noise, text, times
from torch import nn

MODEL = "HunyuanVideo15Transformer3DModel"
SETTINGS = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 16,
    "text_embed_2_dim": 16,
    "image_embed_dim": 16,
    "rope_axes_dim": (4, 4, 4),
}
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    mask = times(seeds, 1.0)[:, None].repeat(1, 7)
    mask[:, 5:] = 0
    return {
        "hidden_states": noise(seeds, 9, *grid),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 16),
        "encoder_attention_mask": mask,
        "encoder_hidden_states_2": text(seeds, 3, 16),
        "encoder_attention_mask_2": mask[:, :3],
        "image_embeds": text(seeds, 2, 16),
    }
