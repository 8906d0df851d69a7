"""Krea 2: single blocks with the text first, and a mask; rotary positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site
from .flux import KEYS, ROTARY
from .parts import modulated, weigh_by

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    scale, shift, *_ = (call["temb"].unflatten(-1, (6, -1)) + block.scale_shift_table).unbind(-2)
    return modulated(block.norm1(call["hidden_states"]), shift, scale)


def grid(model: nn.Module, position_ids: Tensor) -> tuple[int, ...]:
    """Rows and columns, from the position of the last token, which is the image's."""
    return tuple(int(place) + 1 for place in position_ids[-1, 1:].tolist())


SEQUENCE: dict[str, Any] = {
    "text_first": True,
    "rotary": ROTARY,
    "follows": (PerTokenArg("attention_mask", axis=3),),
    "weigh_keys": weigh_by("attention_mask"),
}

FAMILY = Family(
    name="krea2",
    covers="Krea 2",
    models=("Krea2Transformer2DModel",),
    blocks=(
        Block(
            "Krea2TransformerBlock",
            whole=Site("single", residual=True, features=normalised, **SEQUENCE),
            modules=(Site("self", "attn", **SEQUENCE), Site("mlp", "ff", text_first=True)),
            keys=(Site("kv", "attn", keys_projections=KEYS, **SEQUENCE),),
        ),
    ),
    grid_from="position_ids",
    grid=grid,
    pipelines=("Krea2Pipeline",),
)
