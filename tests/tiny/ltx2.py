"""LTX-2 with a key frame behind its video, and tables for each head."""

from __future__ import annotations

import math
from typing import Any

import torch
from seeded import noise, text, times
from torch import nn

MODEL = "LTX2VideoTransformer3DModel"
SETTINGS = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 8,
    "num_layers": 2,
    "caption_channels": 16,
    "rope_type": "split",
    "rope_double_precision": False,
}
GRID, ODD = (2, 8, 8), (3, 5, 7)


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    frames, height, width = grid
    coords = model.rope.prepare_video_coords(len(seeds), frames, height, width, torch.device("cpu"))
    frame = height * width
    steps = times(seeds, time)[:, None].repeat(1, math.prod(grid) + frame)
    steps[:, -frame:] = 0
    return {
        "hidden_states": noise(seeds, math.prod(grid) + frame, 8),
        "audio_hidden_states": noise(seeds, 5, 4),
        "timestep": steps,
        "audio_timestep": times(seeds, time),
        "encoder_hidden_states": text(seeds, 7, 16),
        "audio_encoder_hidden_states": text(seeds, 7, 16),
        "num_frames": frames,
        "height": height,
        "width": width,
        "audio_num_frames": 5,
        "video_coords": torch.cat([coords, coords[:, :, :frame]], dim=2),
    }
