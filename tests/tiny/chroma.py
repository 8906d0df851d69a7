"""With padded text, which a mask leaves out."""

from __future__ import annotations

import math
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from seeded import noise, positions, text, times
from torch import nn

MODEL = "ChromaTransformer2DModel"
SETTINGS = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
    "approximator_num_channels": 8,
    "approximator_hidden_dim": 32,
    "approximator_layers": 1,
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    lengths = torch.tensor([[3 + seed] for seed in seeds])
    padded = torch.arange(7) < lengths
    return {
        "hidden_states": noise(seeds, math.prod(grid), 16),
        "timestep": times(seeds, time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "attention_mask": F.pad(padded, (0, math.prod(grid)), value=True),
        "img_ids": F.pad(positions(*grid), (1, 0)),
        "txt_ids": torch.zeros(7, 3),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.ChromaPipeline(transformer=model, scheduler=scheduler, **parts)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    negative = (9,) * len(seeds)
    return {
        "prompt_embeds": text(seeds, 7, 32),
        "prompt_attention_mask": torch.ones(len(seeds), 7),
        "negative_prompt_embeds": text(negative, 7, 32),
        "negative_prompt_attention_mask": (torch.arange(7) < 3).float().expand(len(seeds), -1),
        "latents": noise(seeds, 64, 16),
        "height": 128,
        "width": 128,
    }
