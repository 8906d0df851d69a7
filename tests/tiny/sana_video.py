from __future__ import annotations

from typing import Any

import diffusers
from seeded import bare_pipeline, noise, text, times
from torch import nn

MODEL = "SanaVideoTransformer3DModel"
SETTINGS = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 12,
    "cross_attention_dim": 24,
    "caption_channels": 16,
    "rope_max_seq_len": 32,
}
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    frames, height, width = grid
    return {
        "hidden_states": noise(seeds, 4, frames, 2 * height, 2 * width),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 16),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("SanaVideoPipeline", model)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 16),
        "prompt_attention_mask": times(seeds, 1.0)[:, None].expand(-1, 7),
        "negative_prompt": None,
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 16),
        "negative_prompt_attention_mask": times(seeds, 1.0)[:, None].expand(-1, 7),
        "latents": noise(seeds, 4, 2, 16, 16),
        "height": 128,
        "width": 128,
        "frames": 5,
        "use_resolution_binning": False,
    }
