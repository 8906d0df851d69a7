from __future__ import annotations

from typing import Any

from torch import nn

from . import flux

MODEL = "OvisImageTransformer2DModel"
SETTINGS = {key: value for key, value in flux.SETTINGS.items() if key != "pooled_projection_dim"}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    call = flux.call(model, grid, seeds, time)
    del call["pooled_projections"]
    return call
