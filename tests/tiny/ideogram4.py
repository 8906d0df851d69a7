"""Text of another length for each sample, padded in front."""

from __future__ import annotations

import copy
import math
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from seeded import bare_pipeline, noise, positions, prompts, text, times, tokenizer
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLModel

FEATURES = 13 * 8  # of 13 layers of the text encoder

MODEL = "Ideogram4Transformer2DModel"
SETTINGS = {
    "in_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "adaln_dim": 16,
    "llm_features_dim": FEATURES,
    "mrope_section": (4, 2, 2),
}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    picture = math.prod(grid)
    padding = torch.tensor([[4 - seed] for seed in seeds])
    real = torch.arange(7) >= padding
    places = (torch.arange(7) - padding).clamp_min(0)[..., None].expand(-1, -1, 3)
    ids = (1000 + F.pad(positions(*grid), (1, 0))).long()
    return {
        "hidden_states": F.pad(noise(seeds, picture, 16), (0, 0, 7, 0)),
        "timestep": times(seeds, 1 - time),
        "encoder_hidden_states": F.pad(text(seeds, 7, FEATURES), (0, 0, 0, picture)),
        "position_ids": torch.cat([places, ids.expand(len(seeds), -1, -1)], dim=1),
        "segment_ids": F.pad(torch.where(real, 1, -1), (0, picture), value=1),
        "indicator": F.pad(torch.where(real, 3, 0), (0, picture), value=2),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 36, "vocab_size": 12}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 8}
    text_encoder = Qwen3VLModel(Qwen3VLConfig(text_config=sizes | heads, vision_config=vision)).eval()
    parts = {"text_encoder": text_encoder, "tokenizer": tokenizer()}
    unconditional = copy.deepcopy(model)
    return bare_pipeline("Ideogram4Pipeline", model, unconditional_transformer=unconditional, **parts)


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt": prompts(seeds),
        "max_sequence_length": 8,
        "guidance_scale": 3.0,
        "guidance_schedule": None,
        "latents": noise(seeds, 64, 16),
        "height": 128,
        "width": 128,
    }
