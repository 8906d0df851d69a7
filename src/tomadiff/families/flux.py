"""Flux.1: joint blocks, then single blocks; rotary positions, text before image in every sequence."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from . import sequence
from .family import Block, Call, Family, Rows, Site
from .parts import ada_norm


def single_normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm(call["hidden_states"], emb=call["temb"])[0]


def mask(call: Call, bias: Tensor) -> Tensor:
    """[B, 1, 1, T + S]: text that is in a sequence of its own comes in front."""
    text = call.get("encoder_hidden_states")
    return (bias if text is None else F.pad(bias, (text.shape[1], 0)))[:, None, None]


def weigh_module_keys(call: Call, bias: Tensor) -> None:
    call["attention_mask"] = mask(call, bias)


def weigh_block_keys(call: Call, bias: Tensor) -> None:
    more = call.get("joint_attention_kwargs") or {}
    call["joint_attention_kwargs"] = {**more, "attention_mask": mask(call, bias)}


ROTARY = (Rows("image_rotary_emb"),)
ATTENTION: dict[str, Any] = {"rotary": ROTARY, "mask": "attention_mask", "weigh_keys": weigh_module_keys}
BLOCK: dict[str, Any] = {"outputs": (1,), "residual": True, "rotary": ROTARY, "weigh_keys": weigh_block_keys}
KEYS = ("to_k", "to_v")

JOINT = Block(
    "FluxTransformerBlock",
    whole=Site("joint", features=ada_norm, **BLOCK),
    # an IP-Adapter's share comes back third
    modules=(Site("self", "attn", outputs=(0, 2), **ATTENTION), Site("mlp", "ff")),
    keys=(Site("kv", "attn", keys_projections=KEYS, **ATTENTION),),
)
SINGLE = Block(
    "FluxSingleTransformerBlock",
    whole=Site("single", features=single_normalised, **BLOCK),
    modules=(Site("self", "attn", lead=True, **ATTENTION), Site("mlp", "proj_mlp", tokens=None, lead=True)),
    keys=(Site("kv", "attn", lead=True, keys_projections=KEYS, **ATTENTION),),
    joined=True,
)

FAMILY = Family(
    name="flux",
    covers="Flux.1",
    models=("FluxTransformer2DModel",),
    blocks=(JOINT, SINGLE),
    grid_from="img_ids",
    grid=sequence.grid,
    others=sequence.others,
    between_blocks=("controlnet_block_samples", "controlnet_single_block_samples"),
)
