"""References before the picture, with a modulation of their own, as when their keys and values are cached."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from seeded import noise, positions
from torch import nn

from . import flux2

MODEL, SETTINGS = flux2.MODEL, flux2.SETTINGS
REFERENCE = (4, 6)
NEEDS = ("kv_cache_mode",)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    alone, tokens = flux2.call(model, grid, seeds, time), math.prod(REFERENCE)
    ids = F.pad(F.pad(positions(*REFERENCE), (1, 0), value=10.0), (0, 1))
    return alone | {
        "hidden_states": torch.cat([noise(seeds, tokens, 16), alone["hidden_states"]], dim=1),
        "img_ids": torch.cat([ids, alone["img_ids"]]),
        "kv_cache_mode": "extract",
        "num_ref_tokens": tokens,
    }
