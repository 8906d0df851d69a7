"""Two layers that are drawn together, and the picture that they add up to, which stays whole."""

from __future__ import annotations

import math
from typing import Any

import torch
from seeded import noise, text, times
from torch import nn

from . import qwen_image

MODEL = qwen_image.MODEL
SETTINGS = qwen_image.SETTINGS | {"use_layer3d_rope": True, "use_additional_t_cond": True}
GRID, ODD = (2, 8, 8), (2, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    layers, *sides = grid
    return {
        "hidden_states": noise(seeds, (layers + 1) * math.prod(sides), 16),
        "timestep": times(seeds, time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "img_shapes": [[(1, *sides)] * (layers + 1)] * len(seeds),
        "additional_t_cond": torch.zeros(len(seeds), dtype=torch.long),
    }
