"""The prior's shape: two stages of one resolution."""

from __future__ import annotations

from typing import Any

from seeded import noise, text, times
from torch import nn

MODEL = "StableCascadeUNet"
SETTINGS = {
    "in_channels": 4,
    "out_channels": 4,
    "timestep_ratio_embedding_dim": 8,
    "patch_size": 1,
    "conditioning_dim": 32,
    "block_out_channels": (32, 32),
    "num_attention_heads": (2, 2),
    "down_num_layers_per_block": (1, 1),
    "up_num_layers_per_block": (1, 1),
    "down_blocks_repeat_mappers": (1, 1),
    "up_blocks_repeat_mappers": (1, 1),
    "block_types_per_layer": (
        ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
        ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
    ),
    "clip_text_in_channels": 32,
    "clip_text_pooled_in_channels": 32,
    "clip_image_in_channels": 32,
    "clip_seq": 2,
    "self_attn": True,
    "switch_level": (False,),
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "sample": noise(seeds, 4, *grid),
        "timestep_ratio": times(seeds, time),
        "clip_text_pooled": text(seeds, 1, 32),
        "clip_text": text(seeds, 7, 32),
        "clip_img": text(seeds, 1, 32),
    }
