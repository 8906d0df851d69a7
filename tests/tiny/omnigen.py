from __future__ import annotations

import math
from typing import Any

import torch
from seeded import noise, times
from torch import nn

MODEL = "OmniGenTransformer2DModel"
SETTINGS = {
    "in_channels": 4,
    "patch_size": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_layers": 2,
    "pad_token_id": 0,
    "vocab_size": 50,
    "time_step_dim": 16,
    "rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    text, length = 7, 8 + math.prod(grid)  # and a token for the time
    mask = torch.ones(length, length).tril()
    mask[text:, :] = 1  # the picture sees everything
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep": times(seeds, 1 - time),
        "input_ids": torch.tensor([[seed, *range(6)] for seed in seeds]),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": mask.expand(len(seeds), -1, -1),
        "position_ids": torch.arange(length).expand(len(seeds), -1),
    }
