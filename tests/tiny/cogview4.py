"""With padded text, which a mask leaves out."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import nn

from . import cogview3

MODEL = "CogView4Transformer2DModel"
SETTINGS = cogview3.SETTINGS | {"rope_axes_dim": (8, 8)}
request = cogview3.request


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    lengths = torch.tensor([[3 + seed] for seed in seeds])
    return cogview3.call(model, grid, seeds, time) | {"attention_mask": torch.arange(7) < lengths}


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.CogView4Pipeline(transformer=model, scheduler=scheduler, **parts)
