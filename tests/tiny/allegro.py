from __future__ import annotations

from typing import Any

import diffusers
from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro
from seeded import bare_pipeline, noise, positions, text, times
from torch import nn

MODEL = "AllegroTransformer3DModel"
SETTINGS = {
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "cross_attention_dim": 48,
    "caption_channels": 16,
    "sample_height": 16,
    "sample_width": 16,
    "sample_frames": 2,
}
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    frames, height, width = grid
    tables = get_3d_rotary_pos_embed_allegro(24, ((0, 0), (height, width)), (height, width), frames)[:3]
    return {
        "hidden_states": noise(seeds, 4, frames, 2 * height, 2 * width),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 16),
        "encoder_attention_mask": times(seeds, 1.0)[:, None].expand(-1, 7),
        "image_rotary_emb": (tables, tuple(axis[None] for axis in positions(*grid).long().T)),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("AllegroPipeline", model, diffusers.DDIMScheduler(clip_sample=False))


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
        "num_frames": 8,
    }
