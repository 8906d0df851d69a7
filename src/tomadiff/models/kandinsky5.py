"""Kandinsky 5, images and video: self-attention, cross-attention, MLP; rotary positions as 2 x 2 matrices.

Its block-sparse attention (NABLA) needs the full grid, so calls that use it are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import modulated

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    shift, scale, *_ = block.visual_modulation(call["time_embed"])[:, None].chunk(9, dim=-1)
    return modulated(block.self_attention_norm(call["visual_embed"].float()), shift, scale)


def grid(model: nn.Module, latent: Tensor) -> tuple[int, ...]:
    """The grid of a latent with channels last, [B, T, H, W, C]."""
    frames, *sides = (side // patch for side, patch in zip(latent.shape[1:4], model.config.patch_size))
    return tuple(sides) if frames == 1 else (frames, *sides)


DENSE_ATTENTION = 'use a model with attention_type="regular"'

FAMILY = Family(
    name="kandinsky5",
    covers="Kandinsky 5 image and video",
    models=("Kandinsky5Transformer3DModel",),
    blocks=(
        Block(
            "Kandinsky5TransformerDecoderBlock",
            whole=Site(
                "block",
                tokens="visual_embed",
                residual=True,
                features=normalised,
                rotary=(PerTokenArg("rope", axis=1),),
                mask="sparse_params",
                unmasked=DENSE_ATTENTION,
            ),
            modules=(
                Site(
                    "self",
                    "self_attention",
                    rotary=(PerTokenArg("rotary_emb", axis=1),),
                    mask="sparse_params",
                    unmasked=DENSE_ATTENTION,
                ),
                Site("cross", "cross_attention"),
                Site("mlp", "feed_forward", tokens="x"),
            ),
            keys=(
                Site(
                    "kv", "self_attention", keys_inside=True, mask="sparse_params", unmasked=DENSE_ATTENTION
                ),
            ),
        ),
    ),
    grid_from="hidden_states",
    grid=grid,
    dimensions="2-D, 3-D",
    pipelines=("Kandinsky5T2IPipeline", "Kandinsky5T2VPipeline"),
)
