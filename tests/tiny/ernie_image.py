"""Texts of different lengths, padded."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import bare_pipeline, noise, text, times
from torch import nn

MODEL = "ErnieImageTransformer2DModel"
SETTINGS = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_layers": 2,
    "ffn_hidden_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 1,
    "text_in_dim": 32,
    "rope_axes_dim": (4, 6, 6),
}
REFUSES = ("tome", "tofu")  # which match tokens of samples that come first


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, 4, *grid),
        "timestep": times(seeds, 1000 * time),
        "text_bth": text(seeds, 7, 32),
        "text_lens": torch.tensor([3 + seed for seed in seeds]),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("ErnieImagePipeline", model)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": list(text(seeds, 7, 32)),
        "negative_prompt_embeds": list(text((9,) * len(seeds), 3, 32)),
        "latents": noise(seeds, 4, 8, 8),
        "height": 128,
        "width": 128,
    }
