"""A picture and a reference of another size in one sequence: only the picture's tokens are merged."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from seeded import noise, positions
from torch import nn

from . import flux

MODEL, SETTINGS = flux.MODEL, flux.SETTINGS
REFERENCE = (4, 6)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    reference = math.prod(REFERENCE)
    alone = flux.call(model, grid, seeds, time)
    ids = F.pad(positions(*REFERENCE), (1, 0), value=1.0)
    return alone | {
        "hidden_states": torch.cat([alone["hidden_states"], noise(seeds, reference, 16)], dim=1),
        "img_ids": torch.cat([alone["img_ids"], ids]),
    }
