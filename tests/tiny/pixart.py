from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import noise, text, times
from torch import nn

MODEL = "PixArtTransformer2DModel"
SETTINGS = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "cross_attention_dim": 32,
    "caption_channels": 32,
    "sample_size": 16,
    "patch_size": 2,
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 32),
        "encoder_attention_mask": (torch.arange(7) < 5).expand(len(seeds), -1),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    scheduler = diffusers.DPMSolverMultistepScheduler()
    return diffusers.PixArtSigmaPipeline(transformer=model, scheduler=scheduler, **parts)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    negative = (9,) * len(seeds)
    return {
        "prompt_embeds": text(seeds, 7, 32),
        "prompt_attention_mask": torch.ones(len(seeds), 7),
        "negative_prompt_embeds": text(negative, 7, 32),
        "negative_prompt_attention_mask": torch.ones(len(seeds), 7),
        "negative_prompt": None,
        "latents": noise(seeds, 4, 16, 16),
        "height": 128,
        "width": 128,
        "use_resolution_binning": False,
    }
