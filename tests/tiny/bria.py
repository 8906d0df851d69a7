from __future__ import annotations

from typing import Any

import diffusers
from pipelines import vae
from seeded import bare_pipeline, noise, text
from torch import nn

from . import flux

MODEL = "BriaTransformer2DModel"
SETTINGS = flux.SETTINGS | {"pooled_projection_dim": None}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return flux.call(model, grid, seeds, 1000 * time)


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("BriaPipeline", model, vae=vae())


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 32),
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 32),
        "latents": noise(seeds, 64, 16),
        "height": 128,
        "width": 128,
    }
