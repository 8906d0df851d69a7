"""Nucleus-Image: Qwen-Image's positions, image queries attend to image and text, mixture-of-experts MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site
from .flux import KEYS
from .qwen_image import ROTARY

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    scale = block.img_mod(call["temb"])[:, None].chunk(4, dim=-1)[0]
    return block.pre_attn_norm(call["hidden_states"]) * (1 + scale)


def grid(model: nn.Module, img_shapes: Any) -> tuple[int, ...]:
    frames, rows, columns = img_shapes if isinstance(img_shapes, tuple) else img_shapes[0]
    return (rows, columns) if frames == 1 else (frames, rows, columns)


ATTENTION: dict[str, Any] = ROTARY | {"follows": (PerTokenArg("attention_mask", axis=1, text_last=True),)}

FAMILY = Family(
    name="nucleus_image",
    covers="Nucleus-Image",
    models=("NucleusMoEImageTransformer2DModel",),
    blocks=(
        Block(
            "NucleusMoEImageTransformerBlock",
            whole=Site(
                "block",
                residual=True,
                features=normalised,
                follows=(PerTokenArg("attention_kwargs.attention_mask", axis=1, text_last=True),),
                **ROTARY,
            ),
            modules=(
                Site("self", "attn", **ATTENTION),
                # the router sees the tokens before modulation
                Site("mlp", "img_mlp", tokens=None, companion_args=("hidden_states_unmodulated",)),
            ),
            keys=(
                Site("kv", "attn", text_last=True, keys_projections=KEYS, weighed_inside=True, **ATTENTION),
            ),
        ),
    ),
    grid_from="img_shapes",
    grid=grid,
    pipelines=("NucleusMoEImagePipeline",),
    output_sign=-1,
)
