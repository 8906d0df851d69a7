"""A block with experts, and padded text, which a mask leaves out."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import bare_pipeline, noise, text
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


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("NucleusMoEImagePipeline", model)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 32),
        "prompt_embeds_mask": (torch.arange(7) < 5).expand(len(seeds), -1),
        "negative_prompt_embeds": text((9,) * len(seeds), 5, 32),
        "negative_prompt_embeds_mask": torch.ones(len(seeds), 5, dtype=torch.bool),
        "latents": noise(seeds, 64, 16),
        "height": 128,
        "width": 128,
    }
