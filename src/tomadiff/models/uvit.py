"""U-ViT (aMUSEd): a transformer between convolutions; it takes no timestep, so each call counts as a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import unet
from .family import Block, Call, Family, Site

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm1(call["hidden_states"], call["added_cond_kwargs"]["pooled_text_emb"])


def grid(model: nn.Module, input_ids: Tensor) -> tuple[int, ...]:
    shrunk = 2 if model.config.downsample else 1
    return tuple(side // shrunk for side in input_ids.shape[-2:])


FAMILY = Family(
    name="uvit",
    covers="aMUSEd",
    models=("UVit2DModel",),
    blocks=(
        Block(
            "BasicTransformerBlock",
            whole=Site("block", residual=True, features=normalised, **unet.SELF),
            modules=(Site("self", "attn1", **unet.SELF), Site("cross", "attn2"), Site("mlp", "ff")),
            keys=(Site("kv", "attn1", keys_argument="encoder_hidden_states", **unet.SELF),),
        ),
    ),
    grid_from="input_ids",
    grid=grid,
    time=None,
    pipelines=("AmusedPipeline",),
)
