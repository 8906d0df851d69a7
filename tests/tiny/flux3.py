"""With a reference, which has blocks of its own first."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from seeded import noise, positions, text, times
from torch import nn

MODEL = "Flux3Transformer2DModel"
SETTINGS = {
    "in_channels": 16,
    "cond_in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "timestep_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
}
REFERENCE = (4, 6)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, math.prod(grid), 16),
        "timestep": times(seeds, time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "img_ids": F.pad(positions(*grid), (1, 1)),
        "txt_ids": F.pad(positions(7), (3, 0)),
        "image_cond_hidden_states": noise(seeds, math.prod(REFERENCE), 16),
        "image_cond_ids": F.pad(F.pad(positions(*REFERENCE), (1, 0), value=10.0), (0, 1)),
    }
