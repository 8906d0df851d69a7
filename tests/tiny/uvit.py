from __future__ import annotations

from typing import Any

import diffusers
import torch
from seeded import bare_pipeline, noise, text
from torch import nn

MODEL = "UVit2DModel"
SETTINGS = {
    "hidden_size": 32,
    "cond_embed_dim": 32,
    "micro_cond_encode_dim": 8,
    "micro_cond_embed_dim": 40,
    "encoder_hidden_size": 32,
    "vocab_size": 32,
    "codebook_size": 24,
    "in_channels": 32,
    "block_out_channels": 32,
    "num_res_blocks": 1,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "block_num_heads": 2,
    "intermediate_size": 64,
    "sample_size": 8,
    "downsample": False,
    "upsample": False,
}
DISCRETE = True  # pictures are made of a few kinds of tokens, which small changes may leave as they are


def call(model: nn.Module, grid: tuple[int, ...], seeds: tuple[int, ...], time: float) -> dict[str, Any]:
    return {
        "input_ids": (noise(seeds, *grid) * 9).long() % 24,
        "encoder_hidden_states": text(seeds, 7, 32),
        "pooled_text_emb": text(seeds, 32),
        "micro_conds": torch.ones(len(seeds), 5),
    }


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    torch.manual_seed(0)
    vqvae = diffusers.VQModel(
        block_out_channels=(8,),
        norm_num_groups=4,
        latent_channels=8,
        num_vq_embeddings=24,
        lookup_from_codebook=True,
        mid_block_add_attention=False,
    )
    scheduler = diffusers.AmusedScheduler(mask_token_id=31)
    return bare_pipeline("AmusedPipeline", model, scheduler, vqvae=vqvae.eval())


def request(seeds: tuple[int, ...]) -> dict[str, Any]:
    negative = (9,) * len(seeds)
    return {
        "prompt_embeds": text(seeds, 32),
        "encoder_hidden_states": text(seeds, 7, 32),
        "negative_prompt_embeds": text(negative, 32),
        "negative_encoder_hidden_states": text(negative, 7, 32),
        "generator": torch.Generator().manual_seed(0),
        "output_type": "pt",  # its latents are names of codes
    }
