from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import bare_pipeline, noise
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


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("Kandinsky5T2VPipeline", model)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return kandinsky5.request(seeds) | {"latents": noise(seeds, 2, 16, 16, 4), "num_frames": 5}
