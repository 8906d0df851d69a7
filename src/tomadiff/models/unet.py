"""Stable Diffusion's UNets: blocks at several resolutions, no rotary positions, no text in the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, Site
from .parts import weigh_by

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm1(call["hidden_states"])


def level(unet: nn.Module, name: str) -> int:
    """Every down block but the last halves the grid; up blocks mirror them."""
    part, _, rest = name.partition(".")
    last = len(unet.config.down_block_types) - 1
    index = int(rest.partition(".")[0]) if part in ("down_blocks", "up_blocks") else 0
    return 2 ** {"down_blocks": index, "up_blocks": last - index}.get(part, last)


SELF: dict[str, Any] = {"mask": "attention_mask", "weigh_keys": weigh_by("attention_mask", axes=3)}


def block(name: str) -> Block:
    return Block(
        name,
        whole=Site("block", residual=True, features=normalised, **SELF),
        modules=(Site("self", "attn1", **SELF), Site("cross", "attn2"), Site("mlp", "ff")),
        keys=(Site("kv", "attn1", keys_argument="encoder_hidden_states", **SELF),),
    )


FAMILY = Family(
    name="unet",
    covers="Stable Diffusion 1.x, 2.x, SDXL, DreamLite",
    models=("UNet2DConditionModel", "DreamLiteUNetModel"),
    blocks=(block("BasicTransformerBlock"), block("BasicTransformerBlockDreamLite")),
    grid_from="sample",
    grid=lambda unet, sample: tuple(sample.shape[-2:]),
    level=level,
    parts=("down_blocks", "mid_block", "up_blocks"),
    paper_reuse=(10, 5),
    pipelines=("StableDiffusionPipeline", "StableDiffusionXLPipeline"),
)
