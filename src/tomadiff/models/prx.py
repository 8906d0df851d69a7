"""PRX: image queries attend to text and image; rotary positions as 2 x 2 matrices.

It computes queries, keys and values in one projection, so keys and values are merged after it. The MLP's
layers are in the block itself, not in a module of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import latent_grid, modulated

if TYPE_CHECKING:
    from torch import Tensor, nn

ROTARY = (PerTokenArg("image_rotary_emb", axis=2),)


def normalised(block: nn.Module, call: Call) -> Tensor:
    shift, scale, _ = block.modulation(call["temb"])[0]
    return modulated(block.img_pre_norm(call["hidden_states"]), shift, scale)


FAMILY = Family(
    name="prx",
    covers="PRX",
    models=("PRXTransformer2DModel",),
    blocks=(
        Block(
            "PRXBlock",
            whole=Site("block", residual=True, features=normalised, rotary=ROTARY),
            modules=(Site("self", "attention", rotary=ROTARY),),
            keys=(Site("kv", "attention", keys_inside=True, text_first=True),),
        ),
    ),
    grid_from="hidden_states",
    grid=latent_grid,
    pipelines=("PRXPipeline",),
    output_sign=0,
)
