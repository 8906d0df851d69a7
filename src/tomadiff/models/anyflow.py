"""AnyFlow: Wan's blocks with per-token modulation, and separate rotary tables for queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .family import Block, Family, PerTokenArg, Site
from .wan import normalised

if TYPE_CHECKING:
    from torch import Tensor, nn


def grid(model: nn.Module, latents: Tensor) -> tuple[int, ...]:
    """Frames, rows and columns of a latent [B, F, C, H, W]."""
    frames, _, height, width = latents.shape[1:]
    return frames, height // model.config.patch_size[1], width // model.config.patch_size[2]


ROTARY = (PerTokenArg("rotary_emb.query", axis=2), PerTokenArg("rotary_emb.key", axis=2))

FAMILY = Family(
    name="anyflow",
    covers="AnyFlow",
    models=("AnyFlowTransformer3DModel",),
    blocks=(
        Block(
            "AnyFlowTransformerBlock",
            whole=Site(
                "block",
                residual=True,
                rotary=ROTARY,
                follows=(PerTokenArg("temb", axis=1),),
                mask="attention_mask",
                features=normalised,
            ),
            modules=(
                Site("self", "attn1", rotary=ROTARY, mask="attention_mask"),
                Site("cross", "attn2"),
                Site("mlp", "ffn"),
            ),
            keys=(Site("kv", "attn1", keys_inside=True),),
        ),
    ),
    grid_from="hidden_states",
    grid=grid,
    dimensions="3-D",
    pipelines=("AnyFlowPipeline",),
)
