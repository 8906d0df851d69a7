"""Cosmos 1 and 2: blocks on a grid of time, height and width; each frame may have its own timestep.

Where blocks add learned positions or ControlNet residuals to their tokens, a merged token gets its
destination's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import weigh_by
from .wan import grid

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    x, positions = call["hidden_states"], call.get("extra_pos_emb")
    x = x if positions is None else x + positions
    return block.norm1(x, call["embedded_timestep"], call.get("temb"))[0]


ROTARY = (PerTokenArg("image_rotary_emb"),)
ATTENTION: dict[str, Any] = {
    "rotary": ROTARY,
    "mask": "attention_mask",
    "weigh_keys": weigh_by("attention_mask"),
}

FAMILY = Family(
    name="cosmos",
    covers="Cosmos Predict 1, 2 and Transfer",
    models=("CosmosTransformer3DModel",),
    blocks=(
        Block(
            "CosmosTransformerBlock",
            whole=Site(
                "block",
                residual=True,
                rotary=ROTARY,
                follows=(
                    PerTokenArg("temb", axis=1, ndim=3),
                    PerTokenArg("embedded_timestep", axis=1, ndim=3),
                    PerTokenArg("extra_pos_emb", axis=1),
                    PerTokenArg("controlnet_residual", axis=1),
                ),
                features=normalised,
            ),
            modules=(Site("self", "attn1", **ATTENTION), Site("cross", "attn2"), Site("mlp", "ff")),
            keys=(Site("kv", "attn1", keys_argument="encoder_hidden_states", **ATTENTION),),
        ),
    ),
    grid_from="hidden_states",
    grid=grid,
    dimensions="3-D",
    output_sign=0,
)
