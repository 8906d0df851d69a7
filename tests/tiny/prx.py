from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import bare_pipeline, noise, text, times
from torch import nn

MODEL = "PRXTransformer2DModel"
SETTINGS = {
    "in_channels": 4,
    "patch_size": 2,
    "context_in_dim": 32,
    "hidden_size": 32,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 2,
    "axes_dim": [8, 8],
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    lengths = torch.tensor([[3 + seed] for seed in seeds])
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep": times(seeds, time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "attention_mask": torch.arange(7) < lengths,
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("PRXPipeline", model, vae=None)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 32),
        "prompt_attention_mask": torch.ones(len(seeds), 7, dtype=torch.bool),
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 32),
        "negative_prompt_attention_mask": torch.ones(len(seeds), 7, dtype=torch.bool),
        "latents": noise(seeds, 4, 16, 16),
        "height": 128,
        "width": 128,
        "use_resolution_binning": False,
    }
