from __future__ import annotations

from typing import Any

import diffusers
from seeded import bare_pipeline, noise, text, times
from torch import nn

MODEL = "HunyuanVideo15Transformer3DModel"
SETTINGS = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 16,
    "text_embed_2_dim": 16,
    "image_embed_dim": 16,
    "rope_axes_dim": (4, 4, 4),
}
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    mask = times(seeds, 1.0)[:, None].repeat(1, 7)
    mask[:, 5:] = 0
    return {
        "hidden_states": noise(seeds, 9, *grid),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 16),
        "encoder_attention_mask": mask,
        "encoder_hidden_states_2": text(seeds, 3, 16),
        "encoder_attention_mask_2": mask[:, :3],
        "image_embeds": text(seeds, 2, 16),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    vae = diffusers.AutoencoderKLHunyuanVideo15(latent_channels=4, block_out_channels=(8,) * 5)
    return bare_pipeline("HunyuanVideo15Pipeline", model, vae=vae, guider=diffusers.ClassifierFreeGuidance())


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    others, mask = (9,) * len(seeds), times(seeds, 1.0)[:, None].expand(-1, 7)
    return {
        "prompt_embeds": text(seeds, 7, 16),
        "prompt_embeds_mask": mask,
        "prompt_embeds_2": text(seeds, 3, 16),
        "prompt_embeds_mask_2": mask[:, :3],
        "negative_prompt_embeds": text(others, 7, 16),
        "negative_prompt_embeds_mask": mask,
        "negative_prompt_embeds_2": text(others, 3, 16),
        "negative_prompt_embeds_mask_2": mask[:, :3],
        "latents": noise(seeds, 4, 2, 8, 8),
        "height": 128,
        "width": 128,
        "num_frames": 5,
    }
