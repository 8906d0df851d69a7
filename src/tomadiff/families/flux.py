"""Flux.1: joint blocks, then single blocks; rotary positions, text before image in every sequence."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .family import Block, Call, Family, Site


def joint_normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm1(call["hidden_states"], emb=call["temb"])[0]


def single_normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm(call["hidden_states"], emb=call["temb"])[0]


def weigh_module_keys(call: Call, bias: Tensor) -> None:
    call["attention_mask"] = F.pad(bias, (call["encoder_hidden_states"].shape[1], 0))[:, None, None]


def weigh_block_keys(call: Call, bias: Tensor) -> None:
    mask = F.pad(bias, (call["encoder_hidden_states"].shape[1], 0))[:, None, None]  # [B, 1, 1, T + K]
    call["joint_attention_kwargs"] = {**(call.get("joint_attention_kwargs") or {}), "attention_mask": mask}


def grid(model: nn.Module, img_ids: Tensor) -> tuple[int, ...]:
    """Rows and columns, from the position of the last token. Waits for the device, once for each table."""
    last = (img_ids[0] if img_ids.ndim == 3 else img_ids)[-1].tolist()
    return int(last[1]) + 1, int(last[2]) + 1


JOINT = Block(
    "FluxTransformerBlock",
    whole=Site(
        "joint",
        outputs=(1,),
        residual=True,
        features=joint_normalised,
        rotary="image_rotary_emb",
        weigh_keys=weigh_block_keys,
    ),
    modules=(
        # an IP-Adapter's share comes back third
        Site(
            "self",
            "attn",
            outputs=(0, 2),
            rotary="image_rotary_emb",
            mask="attention_mask",
            weigh_keys=weigh_module_keys,
        ),
        Site("mlp", "ff"),
    ),
)
SINGLE_SITE = Site(
    "single",
    outputs=(1,),
    residual=True,
    features=single_normalised,
    rotary="image_rotary_emb",
    weigh_keys=weigh_block_keys,
)

FAMILY = Family(
    name="flux",
    covers="Flux.1",
    models=("FluxTransformer2DModel",),
    # attention and MLP of a single block run side by side on one input: as a module, it is whole
    blocks=(JOINT, Block("FluxSingleTransformerBlock", whole=SINGLE_SITE, modules=(SINGLE_SITE,))),
    grid_from="img_ids",
    grid=grid,
    between_blocks=("controlnet_block_samples", "controlnet_single_block_samples"),
)
