"""Flux.3: joint blocks for text, image and references, then single blocks with per-token modulation.

Reference images are never merged. Attention and MLP of single blocks run on text and image together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import sequence
from .family import Block, Call, Family, PerTokenArg, Site
from .flux import KEYS, ROTARY
from .parts import modulated

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    shift, scale, _ = call["temb_mod"][:, :1].chunk(3, dim=-1)  # the image comes first
    return modulated(block.norm(call["hidden_states"]), shift, scale)


def grid(model: nn.Module, ids: Tensor, references: Tensor | None) -> tuple[int, ...]:
    return sequence.grid(model, ids)


def reference_tokens(model: nn.Module, ids: Tensor, references: Tensor | None) -> tuple[int, int]:
    return 0, 0 if references is None else references.shape[-2]


WHOLE: dict[str, Any] = {
    "residual": True,
    "features": normalised,
    "rotary": ROTARY,
    "follows": (PerTokenArg("temb_mod", axis=1),),
}

ATTENTION_TO_MERGED: dict[str, Any] = {
    "rotary": ROTARY,
    "keys_projections": KEYS,
    "weighed_inside": True,
}

FAMILY = Family(
    name="flux3",
    covers="Flux.3",
    models=("Flux3Transformer2DModel",),
    blocks=(
        Block(
            "Flux3ModeTransformerBlock",
            whole=Site("picture", **WHOLE),
            modules=(Site("self", "attn", rotary=ROTARY), Site("mlp", "ff", tokens=None)),
            keys=(Site("kv", "attn", **ATTENTION_TO_MERGED),),
            joined=True,
        ),
        Block(
            "Flux3SingleTransformerBlock",
            whole=Site("single", outputs=(1,), **WHOLE),
            modules=(
                Site("self", "attn", text_first=True, rotary=ROTARY),
                Site("mlp", "ff", tokens=None, text_first=True),
            ),
            keys=(Site("kv", "attn", text_first=True, **ATTENTION_TO_MERGED),),
            joined=True,
        ),
    ),
    grid_from=("img_ids", "image_cond_ids"),
    grid=grid,
    reference_tokens=reference_tokens,
    dense=("txt_mode_blocks", "image_cond"),
)
