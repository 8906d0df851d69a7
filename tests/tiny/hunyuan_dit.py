"""Six blocks, of which the last two take a skip from the first two."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from seeded import bare_pipeline, noise, text, times
from torch import nn

MODEL = "HunyuanDiT2DModel"
SETTINGS = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 16,
    "hidden_size": 32,
    "num_layers": 6,
    "mlp_ratio": 4.0,
    "cross_attention_dim": 32,
    "cross_attention_dim_t5": 32,
    "pooled_projection_dim": 32,
    "text_len": 5,
    "text_len_t5": 7,
    "use_style_cond_and_image_meta_size": False,
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 5, 32),
        "text_embedding_mask": torch.ones(len(seeds), 5),
        "encoder_hidden_states_t5": text(seeds, 7, 32),
        "text_embedding_mask_t5": torch.ones(len(seeds), 7),
        "image_rotary_emb": get_2d_rotary_pos_embed(16, ((0, 0), grid), grid, output_type="pt"),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline(
        "HunyuanDiTPipeline", model, diffusers.DDPMScheduler(), requires_safety_checker=False
    )


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 5, 32),
        "prompt_attention_mask": torch.ones(len(seeds), 5),
        "prompt_embeds_2": text(seeds, 7, 32),
        "prompt_attention_mask_2": torch.ones(len(seeds), 7),
        "negative_prompt_embeds": text((9,) * len(seeds), 5, 32),
        "negative_prompt_attention_mask": torch.ones(len(seeds), 5),
        "negative_prompt_embeds_2": text((9,) * len(seeds), 7, 32),
        "negative_prompt_attention_mask_2": torch.ones(len(seeds), 7),
        "latents": noise(seeds, 4, 16, 16),
        "generator": torch.Generator().manual_seed(0),
        "height": 128,
        "width": 128,
        "use_resolution_binning": False,
    }
