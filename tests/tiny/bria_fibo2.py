"""With a reference behind the picture."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from PIL import Image
from seeded import bare_pipeline, noise, text, times
from torch import nn

MODEL = "BriaFibo2Transformer2DModel"
SETTINGS = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "cap_feat_dim": 32,
    "injection_layer_ids": (1,),
    "perceiver_num_layers": 1,
    "min_num_gist_tokens": 4,
    "max_num_gist_tokens": 8,
    "axes_dims": (4, 6, 6),
    "axes_lens": (64, 64, 64),
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "hidden_states": noise(seeds, 4, *(2 * side for side in grid)),
        "timestep": times(seeds, time),
        "encoder_hidden_states": text(seeds, 2, 7, 32),
        "context_latents": [noise(seeds, 4, 8, 12)],
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(8,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
    )
    return bare_pipeline("BriaFibo2Pipeline", model, vae=vae.eval())


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt_embeds": text(seeds, 2, 7, 32),
        "negative_prompt_embeds": text((9,) * len(seeds), 2, 5, 32),
        "image": Image.linear_gradient("L").convert("RGB"),
        "latents": noise(seeds, 4, 16, 16),
        "height": 128,
        "width": 128,
    }
