from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import bare_pipeline, noise, prompts, tokenizer
from torch import nn
from transformers import Qwen2Config, Qwen2Model

from . import flux

MODEL = "LongCatImageTransformer2DModel"
SETTINGS = {key: value for key, value in flux.SETTINGS.items() if key != "pooled_projection_dim"}


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    call = flux.call(model, grid, seeds, time)
    del call["pooled_projections"]
    return call


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 12}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    text_encoder = Qwen2Model(Qwen2Config(**sizes, **heads)).eval()
    pipe = bare_pipeline("LongCatImagePipeline", model, text_encoder=text_encoder, tokenizer=tokenizer())
    pipe.tokenizer_max_length = 8  # to which prompts are padded
    return pipe


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    return {
        "prompt": prompts(seeds),  # embeddings alone fail in this pipeline
        "negative_prompt": prompts((9,) * len(seeds)),
        "enable_prompt_rewrite": False,
        "latents": noise(seeds, 64, 16),
        "height": 128,
        "width": 128,
    }
