"""Allegro: blocks on a grid of time, height and width; rotary tables come with per-token positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site
from .hunyuan_video import grid
from .parts import modulated, weigh_by

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    x = call["hidden_states"]
    modulation = block.scale_shift_table + call["temb"].reshape(len(x), 6, -1)
    return modulated(block.norm1(x), modulation[:, :1], modulation[:, 1:2])


ATTENTION: dict[str, Any] = {
    "rotary": (PerTokenArg("image_rotary_emb", axis=1, inside=(1,)),),
    "mask": "attention_mask",
    "weigh_keys": weigh_by("attention_mask", axes=3),
}

FAMILY = Family(
    name="allegro",
    covers="Allegro",
    models=("AllegroTransformer3DModel",),
    blocks=(
        Block(
            "AllegroTransformerBlock",
            whole=Site("block", residual=True, features=normalised, **ATTENTION),
            modules=(Site("self", "attn1", **ATTENTION), Site("cross", "attn2"), Site("mlp", "ff")),
            keys=(Site("kv", "attn1", keys_inside=True),),
        ),
    ),
    grid_from="hidden_states",
    grid=grid,
    dimensions="3-D",
    pipelines=("AllegroPipeline",),
)
