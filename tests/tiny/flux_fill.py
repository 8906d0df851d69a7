"""The picture to fill and its mask come as more channels of each token."""

from __future__ import annotations

import math
from typing import Any

import diffusers
import torch
from pipelines import vae
from seeded import bare_pipeline, noise
from torch import nn

from . import flux

MODEL = flux.MODEL
CHANNELS = 16 + 16 + 4 * 64  # of noise, of the masked picture, and 16 x 16 pixels of the mask
SETTINGS = flux.SETTINGS | {"in_channels": CHANNELS, "out_channels": 16}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    tokens = noise(seeds, math.prod(grid), CHANNELS)
    return flux.call(model, grid, seeds, time) | {"hidden_states": tokens}


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    torch.manual_seed(0)
    return bare_pipeline("FluxFillPipeline", model, vae=vae())


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    mask = torch.zeros(len(seeds), 1, 128, 128)
    mask[..., 64:] = 1
    return flux.request(seeds) | {
        "image": noise(seeds, 3, 128, 128).sigmoid(),
        "mask_image": mask,
        "generator": torch.Generator().manual_seed(0),
    }
