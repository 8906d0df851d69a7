"""Bria: Flux's blocks. Fibo's single blocks have text in their sequence, different text in each block."""

from __future__ import annotations

from typing import Any

from . import flux
from .family import Block, Family, PerTokenArg, Site
from .parts import ada_norm, weigh_by

MASK = "joint_attention_kwargs.attention_mask"
WHOLE: dict[str, Any] = {
    "residual": True,
    "rotary": flux.ROTARY,
    "follows": (PerTokenArg(MASK, axis=3),),
    "weigh_keys": weigh_by(MASK, text=flux.TEXT),
}
ATTENTION: dict[str, Any] = {
    "rotary": flux.ROTARY,
    "follows": (PerTokenArg("attention_mask", axis=3),),
    "weigh_keys": weigh_by("attention_mask", text=flux.TEXT),
}

FIBO = (
    Block(
        "BriaFiboTransformerBlock",
        whole=Site("joint", outputs=(1,), features=ada_norm, **WHOLE),
        modules=(Site("self", "attn", outputs=(0,), **ATTENTION), Site("mlp", "ff")),
        keys=(Site("kv", "attn", keys_projections=flux.KEYS, **ATTENTION),),
    ),
    Block(
        "BriaFiboSingleTransformerBlock",
        whole=Site("single", text_first=True, features=flux.single_normalised, **WHOLE),
        modules=(
            Site("self", "attn", text_first=True, **ATTENTION),
            Site("mlp", "proj_mlp", tokens=None, text_first=True),
        ),
        keys=(Site("kv", "attn", text_first=True, keys_projections=flux.KEYS, **ATTENTION),),
        joined=True,
    ),
)

FAMILY = Family(
    name="bria",
    covers="Bria 3.2, Fibo",
    models=("BriaTransformer2DModel", "BriaFiboTransformer2DModel"),
    blocks=(*flux.blocks("Bria", "attention_kwargs"), *FIBO),
    between_blocks=flux.CONTROL,
    pipelines=("BriaPipeline",),
    **flux.PICTURES,
)
