from __future__ import annotations

import math
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, LTXPipeline
from seeded import noise, text, times
from torch import nn

MODEL = "LTXVideoTransformer3DModel"
SETTINGS = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "num_layers": 2,
    "caption_channels": 16,
}
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    frames, height, width = grid
    return {
        "hidden_states": noise(seeds, math.prod(grid), 8),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 16),
        "encoder_attention_mask": times(seeds, 1.0)[:, None].expand(-1, 7),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


def pipeline(model: nn.Module) -> LTXPipeline:
    parts = dict.fromkeys(("tokenizer", "text_encoder", "vae"))
    return LTXPipeline(transformer=model, scheduler=FlowMatchEulerDiscreteScheduler(), **parts)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 16),
        "prompt_attention_mask": times(seeds, 1.0)[:, None].expand(-1, 7),
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 16),
        "negative_prompt_attention_mask": times(seeds, 1.0)[:, None].expand(-1, 7),
        "latents": noise(seeds, 128, 8),
        "height": 256,
        "width": 256,
        "num_frames": 9,
    }
