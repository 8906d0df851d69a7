"""LTX-2: video and audio in one block. Video tokens are merged; audio tokens are few, and never merged."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .family import Block, Family, PerTokenArg, Site
from .ltx import normalised

if TYPE_CHECKING:
    from torch import Tensor, nn


def grid(model: nn.Module, frames: int, height: int, width: int, tokens: Tensor) -> tuple[int, ...]:
    return frames, height, width


def reference_tokens(model: nn.Module, *sources: Any) -> tuple[int, int]:
    """Key frames and reference videos follow the generated video."""
    return 0, sources[-1].shape[1] - math.prod(grid(model, *sources))


def rotary(*arguments: str) -> tuple[PerTokenArg, ...]:
    """Rotary tables shared by all heads, [B, N, D], or one per head, [B, H, N, D]."""
    return tuple(PerTokenArg(name, axis=ndim - 2, ndim=ndim) for name in arguments for ndim in (3, 4))


MODULATION = tuple(PerTokenArg(name, axis=1) for name in ("temb", "temb_ca_scale_shift", "temb_ca_gate"))
ATTENTION: dict[str, Any] = {"rotary": rotary("query_rotary_emb"), "mask": "attention_mask"}

FAMILY = Family(
    name="ltx2",
    covers="LTX-2",
    models=("LTX2VideoTransformer3DModel",),
    blocks=(
        Block(
            "LTX2VideoTransformerBlock",
            whole=Site(
                "block",
                outputs=(0,),
                residual=True,
                rotary=rotary("video_rotary_emb", "ca_video_rotary_emb"),
                follows=MODULATION,
                mask="self_attention_mask",
                features=normalised,
            ),
            modules=(Site("self", "attn1", **ATTENTION), Site("cross", "attn2"), Site("mlp", "ff")),
            keys=(Site("kv", "attn1", keys_inside=True),),
        ),
    ),
    grid_from=("num_frames", "height", "width", "hidden_states"),
    grid=grid,
    reference_tokens=reference_tokens,
    dimensions="3-D",
    pipelines=("LTX2Pipeline",),
)
