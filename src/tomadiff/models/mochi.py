"""Mochi 1: joint blocks; text is a separate argument; one rotary table per head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm1(call["hidden_states"], call["temb"])[0]


def grid(model: nn.Module, latents: Tensor) -> tuple[int, ...]:
    """Frames, rows and columns of a latent [B, C, F, H, W]."""
    frames, height, width = latents.shape[-3:]
    return frames, height // model.config.patch_size, width // model.config.patch_size


ROTARY: dict[str, Any] = {"rotary": (PerTokenArg("image_rotary_emb"),)}

FAMILY = Family(
    name="mochi",
    covers="Mochi 1",
    models=("MochiTransformer3DModel",),
    blocks=(
        Block(
            "MochiTransformerBlock",
            whole=Site("joint", outputs=(0,), residual=True, features=normalised, **ROTARY),
            modules=(Site("self", "attn1", outputs=(0,), **ROTARY), Site("mlp", "ff")),
            keys=(Site("kv", "attn1", keys_projections=("to_k", "to_v"), **ROTARY),),
        ),
    ),
    grid_from="hidden_states",
    grid=grid,
    dimensions="3-D",
    pipelines=("MochiPipeline",),
    ascending=True,
)
