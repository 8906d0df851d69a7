"""With padded text, which a mask leaves out."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import bare_pipeline, noise, text, times
from torch import nn

MODEL = "HunyuanImageTransformer2DModel"
SETTINGS = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "patch_size": (2, 2),
    "text_embed_dim": 32,
    "rope_axes_dim": (8, 8),
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    lengths = torch.tensor([[3 + seed] for seed in seeds])
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "encoder_attention_mask": torch.arange(7) < lengths,
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("HunyuanImagePipeline", model)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 32),
        "prompt_embeds_mask": torch.ones(len(seeds), 7),
        "prompt_embeds_2": text(seeds, 3, 1472),
        "prompt_embeds_mask_2": torch.ones(len(seeds), 3),
        "latents": noise(seeds, 4, 16, 16),
        "height": 512,
        "width": 512,
    }
