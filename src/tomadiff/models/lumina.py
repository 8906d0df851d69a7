"""Lumina-Next: self- and cross-attention side by side, rotary positions as complex numbers.

Attention returns its heads on a separate axis, so with where="module" only the MLP is merged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import latent_grid

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm1(call["hidden_states"], call["temb"])[0]


FAMILY = Family(
    name="lumina",
    covers="Lumina-Next",
    models=("LuminaNextDiT2DModel",),
    blocks=(
        Block(
            "LuminaNextDiTBlock",
            whole=Site(
                "block",
                residual=True,
                features=normalised,
                rotary=(PerTokenArg("image_rotary_emb", axis=1),),
                follows=(PerTokenArg("attention_mask", axis=1),),
            ),
            modules=(Site("mlp", "feed_forward", tokens="x"),),
            keys=(
                Site(
                    "kv",
                    "attn1",
                    keys_argument="encoder_hidden_states",
                    weighed_inside=True,
                    follows=(PerTokenArg("key_rotary_emb", axis=1), PerTokenArg("attention_mask", axis=1)),
                ),
            ),
        ),
    ),
    grid_from="hidden_states",
    grid=latent_grid,
    ascending=True,
    pipelines=("LuminaPipeline",),
    output_sign=-1,
)
