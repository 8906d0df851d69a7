from __future__ import annotations

from typing import Any

import torch
from seeded import noise, text, times
from torch import nn

MODEL = "PRXTransformer2DModel"
SETTINGS = {
    "in_channels": 4,
    "patch_size": 2,
    "context_in_dim": 32,
    "hidden_size": 32,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 2,
    "axes_dim": [8, 8],
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    lengths = torch.tensor([[3 + seed] for seed in seeds])
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep": times(seeds, time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "attention_mask": torch.arange(7) < lengths,
    }
