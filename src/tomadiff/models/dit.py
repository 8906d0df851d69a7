"""DiT: class labels instead of text; only self-attention and MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import unet
from .family import Block, Call, Family, Site
from .parts import latent_grid

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    x = call["hidden_states"]
    return block.norm1(x, call["timestep"], call["class_labels"], hidden_dtype=x.dtype)[0]


FAMILY = Family(
    name="dit",
    covers="DiT",
    models=("DiTTransformer2DModel",),
    blocks=(
        Block(
            "BasicTransformerBlock",
            whole=Site("block", residual=True, features=normalised, **unet.SELF),
            modules=(Site("self", "attn1", **unet.SELF), Site("mlp", "ff")),
            keys=(Site("kv", "attn1", keys_argument="encoder_hidden_states", **unet.SELF),),
        ),
    ),
    grid_from="hidden_states",
    grid=latent_grid,
    pipelines=("DiTPipeline",),
)
