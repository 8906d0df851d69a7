from __future__ import annotations

from typing import Any

from torch import nn

from . import flux

MODEL = "BriaTransformer2DModel"
SETTINGS = flux.SETTINGS | {"pooled_projection_dim": None}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return flux.call(model, grid, seeds, 1000 * time)
