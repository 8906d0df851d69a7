"""Flux.1 and models built on its blocks: joint blocks, then single blocks; rotary positions, text first.

Reference images (Kontext) follow the generated image in its sequence, and are never merged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import sequence
from .family import Block, Call, Family, PerTokenArg, Site
from .parts import ada_norm, weigh_by

if TYPE_CHECKING:
    from torch import Tensor, nn


def single_normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm(call["hidden_states"], emb=call["temb"])[0]


ROTARY = (PerTokenArg("image_rotary_emb"),)
TEXT = "encoder_hidden_states"
ATTENTION: dict[str, Any] = {
    "rotary": ROTARY,
    "mask": "attention_mask",
    "weigh_keys": weigh_by("attention_mask", text=TEXT),
}
KEYS = ("to_k", "to_v")
ATTENTION_TO_MERGED: dict[str, Any] = ATTENTION | {
    "text_first": True,
    "keys_projections": KEYS,
    "weighed_inside": True,
}


def blocks(prefix: str, attention_kwargs: str = "joint_attention_kwargs") -> tuple[Block, Block]:
    """Flux's blocks under another class name; `attention_kwargs` names their argument for attention."""
    whole: dict[str, Any] = {
        "outputs": (1,),
        "residual": True,
        "rotary": ROTARY,
        "mask": "attention_mask",
        "weigh_keys": weigh_by(f"{attention_kwargs}.attention_mask", text=TEXT),
    }
    joint = Block(
        f"{prefix}TransformerBlock",
        whole=Site("joint", features=ada_norm, **whole),
        # the third output is an IP-Adapter's contribution
        modules=(Site("self", "attn", outputs=(0, 2), **ATTENTION), Site("mlp", "ff")),
        keys=(Site("kv", "attn", **ATTENTION_TO_MERGED),),
    )
    single = Block(
        f"{prefix}SingleTransformerBlock",
        whole=Site("single", features=single_normalised, **whole),
        modules=(
            Site("self", "attn", text_first=True, **ATTENTION),
            Site("mlp", "proj_mlp", tokens=None, text_first=True),
        ),
        keys=(Site("kv", "attn", **ATTENTION_TO_MERGED),),
        joined=True,
    )
    return joint, single


CONTROL = ("controlnet_block_samples", "controlnet_single_block_samples")
PICTURES: dict[str, Any] = {
    "grid_from": "img_ids",
    "grid": sequence.grid,
    "reference_tokens": sequence.reference_tokens,
}

FAMILY = Family(
    name="flux",
    covers="Flux.1 dev, schnell, Fill, Kontext, Krea",
    models=("FluxTransformer2DModel",),
    blocks=blocks("Flux"),
    between_blocks=CONTROL,
    pipelines=("FluxPipeline", "FluxKontextPipeline", "FluxFillPipeline"),
    **PICTURES,
)
