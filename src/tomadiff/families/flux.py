"""Flux.1: joint blocks, then single blocks; rotary positions, text before image in every sequence."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .family import Block, Call, Family, Rows, Site


def joint_normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm1(call["hidden_states"], emb=call["temb"])[0]


def single_normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm(call["hidden_states"], emb=call["temb"])[0]


def mask(call: Call, bias: Tensor, text: int) -> Tensor:
    """[B, 1, 1, T + K]: the text is in front, in the same sequence or in one of its own."""
    if call.get("encoder_hidden_states") is not None:
        text = call["encoder_hidden_states"].shape[1]
    return F.pad(bias, (text, 0))[:, None, None]


def weigh_module_keys(call: Call, bias: Tensor, text: int) -> None:
    call["attention_mask"] = mask(call, bias, text)


def weigh_block_keys(call: Call, bias: Tensor, text: int) -> None:
    more = call.get("joint_attention_kwargs") or {}
    call["joint_attention_kwargs"] = {**more, "attention_mask": mask(call, bias, text)}


def grid(model: nn.Module, img_ids: Tensor) -> tuple[int, ...]:
    """Rows and columns, from the position of the last token. Waits for the device, once for each table."""
    last = (img_ids[0] if img_ids.ndim == 3 else img_ids)[-1].tolist()
    grid, tokens = (int(last[1]) + 1, int(last[2]) + 1), img_ids.shape[-2]
    return grid if math.prod(grid) == tokens else (tokens,)  # more pictures in one sequence are no grid


ROTARY = (Rows("image_rotary_emb"),)
ATTENTION: dict[str, Any] = {"rotary": ROTARY, "mask": "attention_mask", "weigh_keys": weigh_module_keys}
BLOCK: dict[str, Any] = {"outputs": (1,), "residual": True, "rotary": ROTARY, "weigh_keys": weigh_block_keys}
KEYS = ("to_k", "to_v")

JOINT = Block(
    "FluxTransformerBlock",
    whole=Site("joint", features=joint_normalised, **BLOCK),
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
    grid=grid,
    between_blocks=("controlnet_block_samples", "controlnet_single_block_samples"),
)
