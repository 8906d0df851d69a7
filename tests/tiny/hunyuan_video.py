from __future__ import annotations

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline
from seeded import noise, text, times
from torch import nn

MODEL = "HunyuanVideoTransformer3DModel"
SETTINGS = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 1,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (4, 4, 4),
}
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    frames, height, width = grid
    mask = times(seeds, 1.0)[:, None].repeat(1, 7)
    mask[:, 5:] = 0  # padding, as behind most prompts
    return {
        "hidden_states": noise(seeds, 4, frames, 2 * height, 2 * width),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 16),
        "encoder_attention_mask": mask,
        "pooled_projections": text(seeds, 8),
        "guidance": times(seeds, 6000.0),
    }


def pipeline(model: nn.Module) -> HunyuanVideoPipeline:
    parts = dict.fromkeys(("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2", "vae"))
    return HunyuanVideoPipeline(transformer=model, scheduler=FlowMatchEulerDiscreteScheduler(), **parts)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 16),
        "pooled_prompt_embeds": text(seeds, 8),
        "prompt_attention_mask": times(seeds, 1.0)[:, None].expand(-1, 7),
        "latents": noise(seeds, 4, 2, 16, 16),
        "height": 128,
        "width": 128,
        "num_frames": 5,
    }
