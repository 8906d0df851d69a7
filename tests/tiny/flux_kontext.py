"""A picture and a reference of another size in one sequence: only the picture's tokens are merged."""

from __future__ import annotations

import math
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from pipelines import vae
from seeded import bare_pipeline, noise, positions
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


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    torch.manual_seed(0)
    return bare_pipeline("FluxKontextPipeline", model, vae=vae())


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    height, width = (16 * side for side in REFERENCE)
    return flux.request(seeds) | {
        "image": noise(seeds, 3, height, width).sigmoid(),
        "max_area": 128 * 128,
        "_auto_resize": False,  # to a reference of a megapixel
    }
