from __future__ import annotations

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from seeded import noise, text, times
from torch import nn

MODEL = "WanTransformer3DModel"
SETTINGS = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    frames, height, width = grid
    return {
        "hidden_states": noise(seeds, 4, frames, 2 * height, 2 * width),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 16),
    }


def pipeline(model: nn.Module) -> WanPipeline:
    parts = dict.fromkeys(("tokenizer", "text_encoder", "vae"))
    return WanPipeline(transformer=model, scheduler=FlowMatchEulerDiscreteScheduler(), **parts)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 16),
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 16),
        "latents": noise(seeds, 4, 2, 16, 16),
        "height": 128,
        "width": 128,
        "num_frames": 5,
    }
