"""Stable Cascade: attention between convolutions, which need the full feature map.

So only the keys and values of attention, which come from image and text together, can be merged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .family import Block, Family, Site
from .parts import latent_grid

if TYPE_CHECKING:
    from torch import nn


def level(unet: nn.Module, name: str) -> int:
    """Every stage but the first halves the grid, unless `switch_level` says not to; up blocks mirror them."""
    part, number, *_ = name.split(".")
    stages = len(unet.config.block_out_channels)
    stage = int(number) if part == "down_blocks" else stages - 1 - int(number)
    switches = unet.config.switch_level or (True,) * (stages - 1)
    return 2 ** sum(map(bool, switches[:stage]))


FAMILY = Family(
    name="stable_cascade",
    covers="Stable Cascade, prior and decoder",
    models=("StableCascadeUNet",),
    blocks=(
        Block(
            "SDCascadeAttnBlock",
            keys=(
                Site(
                    "kv",
                    "attention",
                    tokens="encoder_hidden_states",
                    text_last=True,
                    keys_argument="encoder_hidden_states",
                    weighed_inside=True,
                ),
            ),
        ),
    ),
    grid_from="sample",
    grid=latent_grid,
    level=level,
    drops_odd=True,
    parts=("down_blocks", "up_blocks"),
    time="timestep_ratio",
    pipelines=("StableCascadePriorPipeline", "StableCascadeDecoderPipeline"),
)
