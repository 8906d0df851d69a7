from __future__ import annotations

from typing import Any

import diffusers
from seeded import bare_pipeline, noise, text, times
from torch import nn

MODEL = "EasyAnimateTransformer3DModel"
SETTINGS = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
    "num_layers": 2,
    "mmdit_layers": 2,
    "time_embed_dim": 8,
    "text_embed_dim": 16,
    "sample_width": 16,
    "sample_height": 16,
}
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    frames, height, width = grid
    return {
        "hidden_states": noise(seeds, 4, frames, 2 * height, 2 * width),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 16),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    vae = diffusers.AutoencoderKLMagvit(latent_channels=4, block_out_channels=(8,) * 4, norm_num_groups=4)
    return bare_pipeline("EasyAnimatePipeline", model, vae=vae)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 16),
        "prompt_attention_mask": times(seeds, 1.0)[:, None].expand(-1, 7),
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 16),
        "negative_prompt_attention_mask": times(seeds, 1.0)[:, None].expand(-1, 7),
        "latents": noise(seeds, 4, 2, 16, 16),
        "height": 128,
        "width": 128,
        "num_frames": 5,
    }
