"""LTX-2 with a key frame behind its video, and tables for each head."""

from __future__ import annotations

import math
from typing import Any

import diffusers
import torch
from seeded import bare_pipeline, noise, text, times
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


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": 7}
    connectors = LTX2TextConnectors(
        caption_channels=16,
        text_proj_in_factor=1,
        connector_rope_base_seq_len=7,
        rope_theta=10000.0,
        rope_double_precision=False,
        causal_temporal_positioning=False,
        **{f"{of}_connector_{size}": value for of in ("video", "audio") for size, value in sizes.items()},
    )
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=8,
        block_out_channels=(8,) * 4,
        decoder_block_out_channels=(8,) * 3,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4,
    )
    audio = diffusers.AutoencoderKLLTX2Audio(base_channels=4, ch_mult=(1,), latent_channels=2, mel_bins=8)
    return bare_pipeline("LTX2Pipeline", model, vae=vae, audio_vae=audio, connectors=connectors)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    mask = times(seeds, 1.0)[:, None].expand(-1, 7)
    return {
        "prompt_embeds": text(seeds, 7, 16),
        "prompt_attention_mask": mask,
        "negative_prompt_embeds": text((9,) * len(seeds), 7, 16),
        "negative_prompt_attention_mask": mask,
        "latents": noise(seeds, 8, 2, 8, 8),
        "audio_latents": noise(seeds, 2, 5, 2),
        "height": 512,
        "width": 512,
        "num_frames": 17,
    }
