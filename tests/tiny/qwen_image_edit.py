"""A picture and its reference, which has a modulation of its own; padded text with a mask."""

from __future__ import annotations

import math
from typing import Any

import torch
from seeded import noise
from torch import nn

from . import qwen_image

MODEL, SETTINGS = qwen_image.MODEL, qwen_image.SETTINGS | {"zero_cond_t": True}
REFERENCE = (4, 6)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    alone = qwen_image.call(model, grid, seeds, time)
    reference = noise(seeds, math.prod(REFERENCE), 16)
    return alone | {
        "hidden_states": torch.cat([alone["hidden_states"], reference], dim=1),
        "img_shapes": [[(1, *grid), (1, *REFERENCE)]] * len(seeds),
    }
