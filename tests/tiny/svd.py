from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLTemporalDecoder, EulerDiscreteScheduler, StableVideoDiffusionPipeline
from seeded import noise, text, times
from torch import nn
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

MODEL = "UNetSpatioTemporalConditionModel"
SETTINGS = {
    "sample_size": 8,
    "in_channels": 8,
    "block_out_channels": (64,),
    "down_block_types": ("CrossAttnDownBlockSpatioTemporal",),
    "up_block_types": ("CrossAttnUpBlockSpatioTemporal",),
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "transformer_layers_per_block": 2,
    "num_attention_heads": 2,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 24,
    "num_frames": 2,
}
GRID = (8, 8)  # of each frame


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "sample": noise(seeds, 2, 8, *grid),
        "timestep": times(seeds, 1000 * time),
        "encoder_hidden_states": text(seeds, 1, 16),
        "added_time_ids": times(seeds, 1.0)[:, None].expand(-1, 3),
    }


def pipeline(model: nn.Module) -> StableVideoDiffusionPipeline:
    """A picture goes in through a real encoder and a real VAE, both tiny."""
    torch.manual_seed(0)
    look = {"hidden_size": 16, "projection_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = CLIPVisionModelWithProjection(
        CLIPVisionConfig(**look, intermediate_size=16, image_size=64, patch_size=32)
    )
    vae = AutoencoderKLTemporalDecoder(
        block_out_channels=(32,) * 4, down_block_types=("DownEncoderBlock2D",) * 4, layers_per_block=1
    )
    return StableVideoDiffusionPipeline(
        vae=vae,
        image_encoder=encoder,
        unet=model,
        scheduler=EulerDiscreteScheduler(prediction_type="v_prediction", timestep_type="continuous"),
        feature_extractor=CLIPImageProcessor(size=64, crop_size=64),
    )


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "image": noise(seeds, 3, 64, 64).tanh(),
        "generator": torch.Generator().manual_seed(0),
        "latents": noise(seeds, 2, 4, 8, 8),
        "height": 64,
        "width": 64,
        "num_frames": 2,
    }
