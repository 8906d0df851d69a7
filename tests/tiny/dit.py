"""It draws squares only."""

from __future__ import annotations

from typing import Any

import torch
from seeded import noise, times
from torch import nn

MODEL = "DiTTransformer2DModel"
SETTINGS = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "num_layers": 2,
    "sample_size": 16,
    "patch_size": 2,
    "num_embeds_ada_norm": 1000,
}
ODD = (9, 9)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep": times(seeds, 999 * time).long(),
        "class_labels": torch.tensor(seeds),
    }
