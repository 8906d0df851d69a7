"""Ideogram 4: single blocks; padding and text first, query-by-key masks, per-sample rotary positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site
from .flux import KEYS

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    scale = block.adaln_modulation(call["adaln_input"]).chunk(4, dim=-1)[0]
    return block.attention_norm1(call["hidden_states"]) * (1 + scale)


def grid(model: nn.Module, position_ids: Tensor) -> tuple[int, ...]:
    """Rows and columns of the image: it comes last, and no text token has its first position id."""
    ids = position_ids[0]
    picture = ids[ids[:, 0] == ids[-1, 0]]
    return tuple(int(side) + 1 for side in (picture[-1] - picture[0])[1:].tolist())


ROTARY = (PerTokenArg("image_rotary_emb", axis=1),)
QUERIES, TO_KEYS = PerTokenArg("attention_mask", axis=2), PerTokenArg("attention_mask", axis=3)
SEQUENCE: dict[str, Any] = {"text_first": True, "rotary": ROTARY, "follows": (QUERIES, TO_KEYS)}

FAMILY = Family(
    name="ideogram4",
    covers="Ideogram 4",
    models=("Ideogram4Transformer2DModel",),
    blocks=(
        Block(
            "Ideogram4TransformerBlock",
            whole=Site("single", residual=True, features=normalised, **SEQUENCE),
            modules=(
                Site("self", "attention", **SEQUENCE),
                Site("mlp", "feed_forward", tokens=None, text_first=True),
            ),
            keys=(
                Site(
                    "kv",
                    "attention",
                    text_first=True,
                    rotary=ROTARY,
                    follows=(TO_KEYS,),
                    keys_projections=KEYS,
                    weighed_inside=True,
                ),
            ),
        ),
    ),
    grid_from="position_ids",
    grid=grid,
    ascending=True,
    pipelines=("Ideogram4Pipeline",),
    output_sign=-1,
)
