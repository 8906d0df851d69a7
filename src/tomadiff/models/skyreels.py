"""SkyReels V2: Wan's blocks; frames may have their own timesteps and attend only to earlier frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import modulated
from .wan import ROTARY, grid

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    """temb: [B, 6, C], or [B, 6, N, C] with one entry per token."""
    table, temb = block.scale_shift_table, call["temb"].float()
    modulation = (
        (table.unsqueeze(2) if temb.ndim == 4 else table).add(temb).reshape(len(temb), 6, -1, temb.shape[-1])
    )
    return modulated(block.norm1(call["hidden_states"].float()), modulation[:, 0], modulation[:, 1])


CAUSAL = (PerTokenArg("attention_mask", axis=2), PerTokenArg("attention_mask", axis=3))

FAMILY = Family(
    name="skyreels",
    covers="SkyReels V2",
    models=("SkyReelsV2Transformer3DModel",),
    blocks=(
        Block(
            "SkyReelsV2TransformerBlock",
            whole=Site(
                "block",
                residual=True,
                rotary=ROTARY,
                follows=(PerTokenArg("temb", axis=2, ndim=4), *CAUSAL),
                features=normalised,
            ),
            modules=(
                Site("self", "attn1", rotary=ROTARY, follows=CAUSAL),
                Site("cross", "attn2"),
                Site("mlp", "ffn"),
            ),
            keys=(Site("kv", "attn1", keys_inside=True),),
        ),
    ),
    grid_from="hidden_states",
    grid=grid,
    dimensions="3-D",
    pipelines=("SkyReelsV2Pipeline", "SkyReelsV2DiffusionForcingPipeline"),
)
