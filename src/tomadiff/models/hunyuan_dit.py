"""HunyuanDiT: self-attention, cross-attention, MLP, rotary positions; skip connections between blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import latent_grid, weigh_by

if TYPE_CHECKING:
    from torch import Tensor, nn

ROTARY = (PerTokenArg("image_rotary_emb"),)
WEIGH = weigh_by("attention_mask", axes=3)


def normalised(block: nn.Module, call: Call) -> Tensor:
    import torch

    x = call["hidden_states"]
    if block.skip_linear is not None:
        x = block.skip_linear(block.skip_norm(torch.cat([x, call["skip"]], dim=-1)))
    return block.norm1(x, call["temb"])


FAMILY = Family(
    name="hunyuan_dit",
    covers="HunyuanDiT",
    models=("HunyuanDiT2DModel",),
    blocks=(
        Block(
            "HunyuanDiTBlock",
            whole=Site("block", residual=True, companion_args=("skip",), features=normalised, rotary=ROTARY),
            modules=(
                Site("self", "attn1", rotary=ROTARY, weigh_keys=WEIGH),
                Site("cross", "attn2", rotary=ROTARY),
                Site("mlp", "ff"),
            ),
            keys=(
                Site("kv", "attn1", keys_argument="encoder_hidden_states", rotary=ROTARY, weigh_keys=WEIGH),
            ),
        ),
    ),
    grid_from="hidden_states",
    grid=latent_grid,
    skips=True,
    pipelines=("HunyuanDiTPipeline",),
)
