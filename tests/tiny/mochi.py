from __future__ import annotations

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, MochiPipeline
from seeded import noise, text, times
from torch import nn

MODEL = "MochiTransformer3DModel"
SETTINGS = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 2,
    "pooled_projection_dim": 16,
    "in_channels": 4,
    "text_embed_dim": 16,
    "time_embed_dim": 8,
    "max_sequence_length": 7,
}
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    frames, height, width = grid
    return {
        "hidden_states": noise(seeds, 4, frames, 2 * height, 2 * width),
        "timestep": times(seeds, 1000 * (1 - time)),
        "encoder_hidden_states": text(seeds, 7, 16),
        "encoder_attention_mask": times(seeds, 1.0)[:, None].expand(-1, 7).bool(),
    }


def pipeline(model: nn.Module) -> MochiPipeline:
    parts = dict.fromkeys(("tokenizer", "text_encoder", "vae"))
    scheduler = FlowMatchEulerDiscreteScheduler(invert_sigmas=True)  # time grows, as in the real one
    return MochiPipeline(transformer=model, scheduler=scheduler, **parts)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    mask = times(seeds, 1.0)[:, None].expand(-1, 7).bool()
    return {
        "prompt_embeds": text(seeds, 7, 16),
        "prompt_attention_mask": mask,
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 16),
        "negative_prompt_attention_mask": mask,
        "latents": noise(seeds, 4, 2, 16, 16),
        "height": 128,
        "width": 128,
        "num_frames": 7,
    }
