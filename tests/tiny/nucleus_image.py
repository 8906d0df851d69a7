"""A block with experts, and padded text, which a mask leaves out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import qwen_image

MODEL = "NucleusMoEImageTransformer2DModel"
SETTINGS = qwen_image.SETTINGS | {
    "num_layers": 3,
    "dense_moe_strategy": "leave_first_block_dense",
    "num_experts": 2,
    "moe_intermediate_dim": 32,
    "capacity_factors": 2.0,
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    call = qwen_image.call(model, grid, seeds, time) | {"img_shapes": [(1, *grid)] * len(seeds)}
    return call | {"encoder_hidden_states_mask": torch.ones(len(seeds), 7, dtype=torch.bool)}
