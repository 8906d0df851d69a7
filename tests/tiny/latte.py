from __future__ import annotations

from typing import Any

import diffusers
from seeded import bare_pipeline, noise, text, times
from torch import nn

MODEL = "LatteTransformer3DModel"
SETTINGS = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "cross_attention_dim": 16,
    "caption_channels": 16,
    "sample_size": 16,
    "patch_size": 2,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "video_length": 2,
}
# frames are samples of a batch


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, 4, 2, *(2 * side for side in grid)),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 16),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("LattePipeline", model, diffusers.DDIMScheduler(clip_sample=False))


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 16),
        "negative_prompt": None,
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 16),
        "latents": noise(seeds, 4, 2, 16, 16),
        "height": 128,
        "width": 128,
        "video_length": 2,
    }
