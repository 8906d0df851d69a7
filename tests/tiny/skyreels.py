"""SkyReels as it forces diffusion: frames have timesteps of their own, and see nothing that comes later."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import bare_pipeline, noise, text, times
from torch import nn

from . import wan

MODEL = "SkyReelsV2Transformer3DModel"
SETTINGS = wan.SETTINGS | {"num_frame_per_block": 2}
GRID, ODD = (2, 8, 8), (4, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    frames, height, width = grid
    return {
        "hidden_states": noise(seeds, 4, frames, 2 * height, 2 * width),
        "timestep": times(seeds, 1000 * time)[:, None].repeat(1, frames),
        "encoder_hidden_states": text(seeds, 7, 16),
        "enable_diffusion_forcing": True,
    }


def scheduler() -> diffusers.UniPCMultistepScheduler:
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("SkyReelsV2DiffusionForcingPipeline", model, scheduler())


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    request = wan.request(seeds) | {"prompt": None, "generator": torch.Generator().manual_seed(seeds[0])}
    del request["latents"]  # the pipeline can't unpack them
    return request
