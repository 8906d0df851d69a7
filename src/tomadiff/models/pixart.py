"""PixArt-alpha and -sigma: Stable Diffusion's blocks at one resolution, with a shared modulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import unet
from .family import Block, Call, Family, Site
from .parts import latent_grid, modulated

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    x = call["hidden_states"]
    shift, scale, *_ = (block.scale_shift_table[None] + call["timestep"].reshape(len(x), 6, -1)).chunk(
        6, dim=1
    )
    return modulated(block.norm1(x), shift, scale)


FAMILY = Family(
    name="pixart",
    covers="PixArt-alpha, PixArt-sigma",
    models=("PixArtTransformer2DModel",),
    blocks=(
        Block(
            "BasicTransformerBlock",
            whole=Site("block", residual=True, features=normalised, **unet.SELF),
            modules=(Site("self", "attn1", **unet.SELF), Site("cross", "attn2"), Site("mlp", "ff")),
            keys=(Site("kv", "attn1", keys_argument="encoder_hidden_states", **unet.SELF),),
        ),
    ),
    grid_from="hidden_states",
    grid=latent_grid,
    between_blocks=("controlnet_block_samples",),
    pipelines=("PixArtSigmaPipeline",),
)
