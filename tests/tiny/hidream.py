"""Two experts, so that samples can't be told apart by rounding in the choice of more."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import bare_pipeline, noise, text, times
from torch import nn

MODEL = "HiDreamImageTransformer2DModel"
SETTINGS = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "caption_channels": [32, 16],
    "text_emb_dim": 8,
    "num_routed_experts": 2,
    "num_activated_experts": 2,
    "axes_dims_rope": (4, 6, 6),
    "max_resolution": (24, 24),
    "llama_layers": [0, 1, 2, 3],
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timesteps": times(seeds, 1000 * time),
        "encoder_hidden_states_t5": text(seeds, 5, 32),
        "encoder_hidden_states_llama3": torch.stack([text(seeds, 4, 16) + layer for layer in range(4)]),
        "pooled_embeds": text(seeds, 8),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    pipe = bare_pipeline("HiDreamImagePipeline", model)
    pipe.default_sample_size = 16  # every size is scaled to this area
    return pipe


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    negative = (9,) * len(seeds)
    return {
        "prompt_embeds_t5": text(seeds, 5, 32),
        "prompt_embeds_llama3": torch.stack([text(seeds, 4, 16) + layer for layer in range(4)]),
        "pooled_prompt_embeds": text(seeds, 8),
        "negative_prompt_embeds_t5": text(negative, 5, 32),
        "negative_prompt_embeds_llama3": torch.stack([text(negative, 4, 16) + layer for layer in range(4)]),
        "negative_pooled_prompt_embeds": text(negative, 8),
        "latents": noise(seeds, 4, 16, 16),
        "height": 128,
        "width": 128,
    }
