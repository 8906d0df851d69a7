"""FramePack: what was drawn before comes first, in patches of three sizes."""

from __future__ import annotations

from typing import Any

import torch
from seeded import noise, text
from torch import nn

from . import hunyuan_video

MODEL = "HunyuanVideoFramepackTransformer3DModel"
SETTINGS = hunyuan_video.SETTINGS | {
    "has_image_proj": True,
    "image_proj_dim": 16,
    "has_clean_x_embedder": True,
    "num_layers": 1,
    "num_single_layers": 1,
}
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    frames, height, width = grid

    def before(count: int, offset: int) -> torch.Tensor:
        return noise(tuple(seed + offset for seed in seeds), 4, count, 2 * height, 2 * width)

    return hunyuan_video.call(model, grid, seeds, time) | {
        "image_embeds": text(seeds, 3, 16),
        "indices_latents": torch.arange(7, 7 + frames),
        "latents_clean": before(1, 100),
        "indices_latents_clean": torch.arange(0, 1),
        "latents_history_2x": before(2, 200),
        "indices_latents_history_2x": torch.arange(1, 3),
        "latents_history_4x": before(4, 300),
        "indices_latents_history_4x": torch.arange(3, 7),
    }
