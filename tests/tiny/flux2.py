from __future__ import annotations

import math
from typing import Any

import diffusers
import torch.nn.functional as F
from seeded import noise, positions, text, times
from torch import nn

MODEL = "Flux2Transformer2DModel"
SETTINGS = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "timestep_guidance_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, math.prod(grid), 16),
        "timestep": times(seeds, time),
        "guidance": times(seeds, 4.0),
        "encoder_hidden_states": text(seeds, 7, 32),
        "img_ids": F.pad(positions(*grid), (1, 1)),
        "txt_ids": F.pad(positions(7), (3, 0)),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return diffusers.Flux2Pipeline(transformer=model, scheduler=scheduler, **parts)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 32),
        "latents": noise(seeds, 16, 8, 8),
        "height": 128,
        "width": 128,
    }
