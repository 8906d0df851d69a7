"""Chroma: Flux's blocks without their modulation, and a mask over text and image.

Blocks multiply the mask by its own transpose before attention, so it can't carry key weights there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site
from .flux import CONTROL, KEYS, PICTURES, ROTARY

if TYPE_CHECKING:
    from torch import Tensor, nn


def joint_normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm1(call["hidden_states"], emb=call["temb"][:, :6])[0]


def single_normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm(call["hidden_states"], emb=call["temb"])[0]


WHOLE: dict[str, Any] = {
    "residual": True,
    "rotary": ROTARY,
    "follows": (PerTokenArg("attention_mask", axis=1),),
}
QUERIES, TO_KEYS = PerTokenArg("attention_mask", axis=2), PerTokenArg("attention_mask", axis=3)
ATTENTION: dict[str, Any] = {"rotary": ROTARY, "follows": (QUERIES, TO_KEYS)}
ATTENTION_TO_MERGED: dict[str, Any] = {
    "text_first": True,
    "rotary": ROTARY,
    "follows": (TO_KEYS,),
    "keys_projections": KEYS,
    "weighed_inside": True,
}

FAMILY = Family(
    name="chroma",
    covers="Chroma",
    models=("ChromaTransformer2DModel",),
    blocks=(
        Block(
            "ChromaTransformerBlock",
            whole=Site("joint", outputs=(1,), features=joint_normalised, **WHOLE),
            modules=(Site("self", "attn", outputs=(0, 2), **ATTENTION), Site("mlp", "ff")),
            keys=(Site("kv", "attn", **ATTENTION_TO_MERGED),),
        ),
        Block(
            "ChromaSingleTransformerBlock",
            whole=Site("single", text_first=True, features=single_normalised, **WHOLE),
            modules=(
                Site("self", "attn", text_first=True, **ATTENTION),
                Site("mlp", "proj_mlp", tokens=None, text_first=True),
            ),
            keys=(Site("kv", "attn", **ATTENTION_TO_MERGED),),
            joined=True,
        ),
    ),
    between_blocks=CONTROL,
    pipelines=("ChromaPipeline",),
    **PICTURES,
)
