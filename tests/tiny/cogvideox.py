from __future__ import annotations

from typing import Any

from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from seeded import noise, text, times
from torch import nn

MODEL = "CogVideoXTransformer3DModel"
SETTINGS = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 16,
    "num_layers": 2,
    "sample_width": 16,
    "sample_height": 16,
    "sample_frames": 5,
    "max_text_seq_length": 7,
    "use_rotary_positional_embeddings": True,
}
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    frames, height, width = grid
    return {
        "hidden_states": noise(seeds, frames, 4, 2 * height, 2 * width),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 16),
        "image_rotary_emb": get_3d_rotary_pos_embed(16, ((0, 0), (height, width)), (height, width), frames),
    }


def pipeline(model: nn.Module) -> CogVideoXPipeline:
    parts = dict.fromkeys(("tokenizer", "text_encoder", "vae"))
    return CogVideoXPipeline(transformer=model, scheduler=CogVideoXDDIMScheduler(), **parts)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 16),
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 16),
        "latents": noise(seeds, 2, 4, 16, 16),
        "height": 128,
        "width": 128,
        "num_frames": 5,
        "max_sequence_length": 7,
    }
