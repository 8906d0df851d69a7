"""Text of another length for each sample, padded in front."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from seeded import noise, positions, text, times
from torch import nn

MODEL = "Ideogram4Transformer2DModel"
SETTINGS = {
    "in_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "adaln_dim": 16,
    "llm_features_dim": 32,
    "mrope_section": (4, 2, 2),
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    picture = math.prod(grid)
    padding = torch.tensor([[4 - seed] for seed in seeds])
    real = torch.arange(7) >= padding
    places = (torch.arange(7) - padding).clamp_min(0)[..., None].expand(-1, -1, 3)
    ids = (1000 + F.pad(positions(*grid), (1, 0))).long()
    return {
        "hidden_states": F.pad(noise(seeds, picture, 16), (0, 0, 7, 0)),
        "timestep": times(seeds, time),
        "encoder_hidden_states": F.pad(text(seeds, 7, 32), (0, 0, 0, picture)),
        "position_ids": torch.cat([places, ids.expand(len(seeds), -1, -1)], dim=1),
        "segment_ids": F.pad(torch.where(real, 1, -1), (0, picture), value=1),
        "indicator": F.pad(torch.where(real, 3, 0), (0, picture), value=2),
    }
