"""It draws squares only."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from pipelines import vae
from seeded import bare_pipeline, noise, times
from torch import nn

MODEL = "DiTTransformer2DModel"
SETTINGS = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "sample_size": 16,
    "patch_size": 2,
    "num_embeds_ada_norm": 1000,
}
ODD = (9, 9)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep": times(seeds, 999 * time).long(),
        "class_labels": torch.tensor(seeds),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("DiTPipeline", model, diffusers.DDIMScheduler(), vae=vae())


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "class_labels": list(seeds),
        "generator": torch.Generator().manual_seed(0),
        "output_type": "np",
    }
