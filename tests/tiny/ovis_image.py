from __future__ import annotations

from typing import Any

import diffusers
from seeded import bare_pipeline, noise, text
from torch import nn

from . import flux

MODEL = "OvisImageTransformer2DModel"
SETTINGS = {key: value for key, value in flux.SETTINGS.items() if key != "pooled_projection_dim"} | {
    "out_channels": 16
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    call = flux.call(model, grid, seeds, time)
    del call["pooled_projections"]
    return call


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("OvisImagePipeline", model)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 32),
        "negative_prompt": None,
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 32),
        "latents": noise(seeds, 64, 16),
        "height": 128,
        "width": 128,
    }
