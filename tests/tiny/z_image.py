from __future__ import annotations

from typing import Any

import diffusers
from seeded import noise, text, times
from torch import nn

MODEL = "ZImageTransformer2DModel"
SETTINGS = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 32,
    "axes_dims": [4, 6, 6],
    "axes_lens": [128, 64, 64],
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "x": list(noise(seeds, 4, 1, *(2 * side for side in grid))),
        "t": times(seeds, 1 - time),
        "cap_feats": list(text(seeds, 7, 32)),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return diffusers.ZImagePipeline(transformer=model, scheduler=scheduler, **parts)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": list(text(seeds, 7, 32)),
        "negative_prompt_embeds": list(text((9,) * len(seeds), 40, 32)),  # padded to another length
        "latents": noise(seeds, 4, 16, 16),
        "height": 128,
        "width": 128,
    }
