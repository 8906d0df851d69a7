"""Flux.2: joint blocks, then single blocks with attention and MLP in parallel; rotary positions, text first.

Reference images, before or after the generated image in its sequence, are never merged. Most blocks compute
queries, keys, values and the MLP's input in one projection, so keys and values are merged after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .family import Block, Call, Family, PerTokenArg, Site
from .flux import ATTENTION, PICTURES, ROTARY, TEXT
from .parts import modulated, weigh_by

if TYPE_CHECKING:
    from torch import Tensor, nn


def joint_normalised(block: nn.Module, call: Call) -> Tensor:
    return normalised(block.norm1(call["hidden_states"]), call["temb_mod_img"], sets=2)


def single_normalised(block: nn.Module, call: Call) -> Tensor:
    return normalised(block.norm(call["hidden_states"]), call["temb_mod"], sets=1)


def normalised(x: Tensor, modulation: Tensor, sets: int) -> Tensor:
    """x with the first set's shift and scale. With per-token modulation, the last token is the image's."""
    modulation = modulation[:, -1:] if modulation.ndim == 3 else modulation[:, None]
    shift, scale, *_ = modulation.chunk(3 * sets, dim=-1)
    return modulated(x, shift, scale)


WEIGH = weigh_by("joint_attention_kwargs.attention_mask", text=TEXT)

KEYS = (Site("kv", "attn", keys_inside=True, text_first=True),)

FAMILY = Family(
    name="flux2",
    covers="Flux.2, Flux.2 Klein",
    models=("Flux2Transformer2DModel",),
    blocks=(
        Block(
            "Flux2TransformerBlock",
            whole=Site(
                "joint",
                outputs=(1,),
                residual=True,
                features=joint_normalised,
                rotary=ROTARY,
                follows=(PerTokenArg("temb_mod_img", axis=1, ndim=3),),
                weigh_keys=WEIGH,
            ),
            modules=(Site("self", "attn", outputs=(0,), **ATTENTION), Site("mlp", "ff", tokens="x")),
            keys=KEYS,
        ),
        Block(
            "Flux2SingleTransformerBlock",
            whole=Site(
                "single",
                text_first=True,
                residual=True,
                features=single_normalised,
                rotary=ROTARY,
                follows=(PerTokenArg("temb_mod", axis=1, ndim=3),),
                weigh_keys=WEIGH,
            ),
            modules=(Site("self", "attn", text_first=True, **ATTENTION),),  # includes the MLP
            keys=KEYS,
            joined=True,
        ),
    ),
    pipelines=("Flux2Pipeline",),
    **PICTURES,
)
