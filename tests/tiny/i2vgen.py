from __future__ import annotations

from typing import Any

from seeded import noise, text, times
from torch import nn

from . import modelscope

MODEL = "I2VGenXLUNet"
SETTINGS = modelscope.SETTINGS | {"num_attention_heads": 2}
GRID = (16, 16)  # of each frame; more than the 75 tokens that it makes of text and image


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return modelscope.call(model, grid, seeds, time) | {
        "fps": times(seeds, 8.0),
        "image_latents": noise(seeds, 4, 2, *grid),
        "image_embeddings": text(seeds, 16),
    }
