from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import bare_pipeline, noise, text, times
from torch import nn

MODEL = "Kandinsky5Transformer3DModel"
SETTINGS = {
    "in_visual_dim": 4,
    "in_text_dim": 32,
    "in_text_dim2": 16,
    "time_dim": 16,
    "out_visual_dim": 4,
    "patch_size": (1, 2, 2),
    "model_dim": 32,
    "ff_dim": 64,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 6, 6),
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, 1, *(2 * side for side in grid), 4),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "pooled_projections": text(seeds, 16),
        "visual_rope_pos": [torch.arange(side) for side in (1, *grid)],
        "text_rope_pos": torch.arange(7),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    pipe = bare_pipeline("Kandinsky5T2IPipeline", model)
    pipe.resolutions = [(128, 128)]
    return pipe


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    others, lengths = (9,) * len(seeds), 7 * torch.arange(len(seeds) + 1)
    return {
        "prompt_embeds_qwen": text(seeds, 7, 32),
        "prompt_embeds_clip": text(seeds, 16),
        "prompt_cu_seqlens": lengths,
        "negative_prompt_embeds_qwen": text(others, 7, 32),
        "negative_prompt_embeds_clip": text(others, 16),
        "negative_prompt_cu_seqlens": lengths,
        "latents": noise(seeds, 1, 16, 16, 4),
        "height": 128,
        "width": 128,
    }
