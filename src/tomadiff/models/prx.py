"""PRX: attention of image queries to text and image; rotary positions as 2 x 2 matrices.

It computes queries, keys and values in one product, so that keys and values alone can't be merged, and the
MLP's parts are in the block itself.
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
        ),
    ),
    grid_from="hidden_states",
    grid=latent_grid,
    pipelines=("PRXPipeline",),
)
