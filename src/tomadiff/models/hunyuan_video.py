"""HunyuanVideo and FramePack: joint blocks, then single blocks; text after the video, with a mask.

In image-to-video models the first frame is given and modulated differently: its tokens come first, also after
merging. FramePack puts earlier frames before the video. They are never merged: the video has to agree with
them, and they are compressed already.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import ada_norm

if TYPE_CHECKING:
    from torch import Tensor, nn

HISTORY = ("latents_clean", "latents_history_2x", "latents_history_4x")


def single_normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm(call["hidden_states"], emb=call["temb"])[0]


def joint_normalised_apart(block: nn.Module, call: Call) -> Tensor:
    given = call["token_replace_emb"], call["num_tokens"]
    return block.norm1(call["hidden_states"], call["temb"], *given)[0]


def single_normalised_apart(block: nn.Module, call: Call) -> Tensor:
    given = call["token_replace_emb"], call["num_tokens"]
    return block.norm(call["hidden_states"], call["temb"], *given)[0]


def weigh_keys(call: Call, bias: Tensor) -> None:
    """Add the bias to the model's own mask, [B, 1, 1, S + T], which excludes padding after the text."""
    import torch.nn.functional as F

    text, mask = call["encoder_hidden_states"].shape[1], call.get("attention_mask")
    bias = F.pad(bias, (0, text))[:, None, None]
    call["attention_mask"] = bias if mask is None else bias.masked_fill(~mask, float("-inf"))


def grid(model: nn.Module, latents: Tensor, *history: Tensor | None) -> tuple[int, ...]:
    """Frames, rows and columns of a latent [B, C, F, H, W]."""
    frames, height, width = latents.shape[-3:]
    patch = model.config.patch_size
    return frames // model.config.patch_size_t, height // patch, width // patch


def reference_tokens(model: nn.Module, latents: Tensor, *history: Tensor | None) -> tuple[int, int]:
    """The number of tokens of earlier frames, which have patches of one, two and four times the size."""
    patch = (model.config.patch_size_t, model.config.patch_size, model.config.patch_size)
    tokens = [
        math.prod(-(-side // (2**level * size)) for side, size in zip(part.shape[-3:], patch))
        for level, part in enumerate(history)
        if part is not None
    ]
    return sum(tokens), 0


MASK = (PerTokenArg("attention_mask", axis=3, text_last=True),)
ATTENTION: dict[str, Any] = {
    "outputs": (0,),
    "rotary": (PerTokenArg("image_rotary_emb"),),
    "follows": MASK,
    "weigh_keys": weigh_keys,
}
BLOCK: dict[str, Any] = {"outputs": (0,), "residual": True, "follows": MASK, "weigh_keys": weigh_keys}

KEYS = (Site("kv", "attn", keys_inside=True, text_last=True),)
JOINT: dict[str, Any] = {
    "modules": (Site("self", "attn", **ATTENTION), Site("mlp", "ff")),
    "keys": KEYS,
}
SINGLE: dict[str, Any] = {
    "modules": (Site("self", "attn", **ATTENTION), Site("mlp", "proj_mlp", tokens=None, text_last=True)),
    "keys": KEYS,
    "joined": True,
}
JOINT_BLOCK = Site("joint", features=ada_norm, rotary=(PerTokenArg("freqs_cis"),), **BLOCK)
SINGLE_BLOCK = Site("single", features=single_normalised, rotary=(PerTokenArg("image_rotary_emb"),), **BLOCK)

FAMILY = Family(
    name="hunyuan_video",
    covers="HunyuanVideo, HunyuanVideo-I2V, FramePack",
    models=("HunyuanVideoTransformer3DModel", "HunyuanVideoFramepackTransformer3DModel"),
    blocks=(
        Block("HunyuanVideoTransformerBlock", whole=JOINT_BLOCK, **JOINT),
        Block("HunyuanVideoSingleTransformerBlock", whole=SINGLE_BLOCK, **SINGLE),
        Block(
            "HunyuanVideoTokenReplaceTransformerBlock",
            whole=replace(JOINT_BLOCK, first_frame="num_tokens", features=joint_normalised_apart),
            **JOINT,
        ),
        Block(
            "HunyuanVideoTokenReplaceSingleTransformerBlock",
            whole=replace(SINGLE_BLOCK, first_frame="num_tokens", features=single_normalised_apart),
            **SINGLE,
        ),
    ),
    grid_from=("hidden_states", *HISTORY),
    grid=grid,
    reference_tokens=reference_tokens,
    dimensions="3-D",
    pipelines=("HunyuanVideoPipeline",),
)
