from __future__ import annotations

from typing import Any

import diffusers
from seeded import bare_pipeline, noise, text, times
from torch import nn

from . import wan

MODEL = "AnyFlowTransformer3DModel"
SETTINGS = wan.SETTINGS
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    frames, height, width = grid
    steps = times(seeds, 1000 * time)[:, None].repeat(1, frames)
    return {
        "hidden_states": noise(seeds, frames, 4, 2 * height, 2 * width),
        "timestep": steps,
        "r_timestep": 0.5 * steps,
        "encoder_hidden_states": text(seeds, 7, 16),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("AnyFlowPipeline", model, diffusers.FlowMapEulerDiscreteScheduler())


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return wan.request(seeds) | {"guidance_scale": 3.0}
