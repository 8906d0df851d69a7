"""Text for each block, padded under a mask."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from seeded import text
from torch import nn

from . import bria

MODEL = "BriaFiboTransformer2DModel"
SETTINGS = bria.SETTINGS | {"text_encoder_dim": 16}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    call = bria.call(model, grid, seeds, time)
    del call["pooled_projections"]
    lengths = torch.tensor([[3 + seed] for seed in seeds])
    mask = F.pad(torch.arange(7) < lengths, (0, call["hidden_states"].shape[1]), value=True)
    return call | {
        "text_encoder_layers": [text(seeds, 7, 16) for _ in range(4)],
        "joint_attention_kwargs": {"attention_mask": mask[:, None, None]},
    }
