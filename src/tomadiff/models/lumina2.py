"""Lumina-Image 2: single blocks with the text first, per-sample rotary positions as complex numbers.

Each image follows its text without padding. A mask therefore means that images start at different indices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import latent_grid

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm1(call["hidden_states"], call["temb"])[0]


SEQUENCE: dict[str, Any] = {
    "text_first": True,
    "rotary": (PerTokenArg("image_rotary_emb", axis=1),),
    "mask": "attention_mask",
    "unmasked": "draw prompts of different lengths one by one",
}

FAMILY = Family(
    name="lumina2",
    covers="Lumina-Image 2.0",
    models=("Lumina2Transformer2DModel",),
    blocks=(
        Block(
            "Lumina2TransformerBlock",
            whole=Site("single", residual=True, features=normalised, **SEQUENCE),
            modules=(
                Site("self", "attn", companion_args=("encoder_hidden_states",), **SEQUENCE),
                Site("mlp", "feed_forward", tokens="x", text_first=True),
            ),
            keys=(
                Site("kv", "attn", keys_argument="encoder_hidden_states", weighed_inside=True, **SEQUENCE),
            ),
        ),
    ),
    grid_from="hidden_states",
    grid=latent_grid,
    dense=("context_refiner",),
    ascending=True,
    pipelines=("Lumina2Pipeline",),
    output_sign=-1,
)
