"""Patches, and attention in the coarser of two stages alone; the prior's picture comes in by convolutions."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import bare_pipeline, noise, text, times
from torch import nn

from . import stable_cascade

MODEL = stable_cascade.MODEL
SETTINGS = stable_cascade.SETTINGS | {
    "patch_size": 2,
    "block_types_per_layer": (
        ("SDCascadeResBlock", "SDCascadeTimestepBlock"),
        ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
    ),
    "clip_text_in_channels": None,
    "clip_image_in_channels": None,
    "effnet_in_channels": 4,
    "switch_level": None,
}
ODD, LEVELS = (10, 14), (2,)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "sample": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep_ratio": times(seeds, time),
        "clip_text_pooled": text(seeds, 1, 32),
        "effnet": text(seeds, 4, 3, 3),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("StableCascadeDecoderPipeline", model, diffusers.DDPMWuerstchenScheduler())


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "image_embeddings": text(seeds, 4, 3, 3),
        "prompt_embeds": text(seeds, 7, 32),
        "prompt_embeds_pooled": text(seeds, 1, 32),
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 32),
        "negative_prompt_embeds_pooled": text((9,) * len(seeds), 1, 32),
        "guidance_scale": 2.0,
        "latents": noise(seeds, 4, 32, 32),
        "generator": torch.Generator().manual_seed(0),
    }
