"""Full-size architectures with random weights: speed does not depend on the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import nn


def sdxl() -> UNet2DConditionModel:
    """The UNet of stable-diffusion-xl-base-1.0."""
    return UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=2,
        attention_head_dim=(5, 10, 20),
        transformer_layers_per_block=(1, 2, 10),
        use_linear_projection=True,
        cross_attention_dim=2048,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    ).eval()


def sdxl_call(unet: nn.Module, size: tuple[int, int], batch: int = 1) -> Callable[[int], Any]:
    """A function of the timestep that runs the model once on an image of that size."""
    sample = torch.randn(batch, unet.config.in_channels, size[0] // 8, size[1] // 8)
    text = torch.randn(batch, 77, unet.config.cross_attention_dim)
    added = {"text_embeds": torch.randn(batch, 1280), "time_ids": torch.randn(batch, 6)}
    # the sample by position: tomesd looks for it there
    return lambda timestep: unet(sample, timestep, encoder_hidden_states=text, added_cond_kwargs=added)
