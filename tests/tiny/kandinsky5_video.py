from __future__ import annotations

from typing import Any

import torch
from seeded import noise
from torch import nn

from . import kandinsky5

MODEL, SETTINGS = kandinsky5.MODEL, kandinsky5.SETTINGS
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    frames, height, width = grid
    return kandinsky5.call(model, (height, width), seeds, time) | {
        "hidden_states": noise(seeds, frames, 2 * height, 2 * width, 4),
        "visual_rope_pos": [torch.arange(side) for side in grid],
    }
