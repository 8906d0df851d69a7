from __future__ import annotations

from typing import Any

from diffusers import AnimateDiffPipeline, DDIMScheduler
from seeded import noise, text, times
from torch import nn

MODEL = "UNetMotionModel"
SETTINGS = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "down_block_types": ("CrossAttnDownBlockMotion", "CrossAttnDownBlockMotion"),
    "up_block_types": ("CrossAttnUpBlockMotion", "CrossAttnUpBlockMotion"),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 16,
    "num_attention_heads": 2,
    "motion_num_attention_heads": 2,
    "motion_max_seq_length": 4,
}
GRID = (8, 8)  # of each frame
LEVELS = (1, 2)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "sample": noise(seeds, 4, 2, *grid),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 7, 16).repeat_interleave(2, dim=0),  # for each frame
    }


def pipeline(model: nn.Module) -> AnimateDiffPipeline:
    parts = dict.fromkeys(("vae", "tokenizer", "text_encoder", "motion_adapter"))
    return AnimateDiffPipeline(unet=model, scheduler=DDIMScheduler(clip_sample=False), **parts)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 7, 16),
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 16),
        "latents": noise(seeds, 4, 2, 8, 8),
        "height": 64,
        "width": 64,
        "num_frames": 2,
    }
