"""Qwen-Image and its edit models: joint blocks, a separate text stream, complex rotary positions.

The edit models' reference images follow the generated image in its sequence, and are never merged. The
layered model generates all layers together; they are merged like the frames of a video.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import modulated

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    x = call["hidden_states"]
    shift, scale, _ = block.img_mod(call["temb"][: len(x)])[:, None].chunk(2, dim=-1)[0].chunk(3, dim=-1)
    return modulated(block.img_norm1(x), shift, scale)


def pictures(img_shapes: list) -> list[tuple[int, int, int]]:
    """Frames, rows and columns of each image in the sequence."""
    first = img_shapes[0]
    return list(first) if isinstance(first, list) else [first]


def drawn(model: nn.Module, img_shapes: list) -> list[tuple[int, int, int]]:
    """The images being generated: the first, or in the layered model all but the last, their composite."""
    shapes = pictures(img_shapes)
    return shapes[:-1] if model.config.get("use_layer3d_rope") else shapes[:1]


def grid(model: nn.Module, img_shapes: list) -> tuple[int, ...]:
    shapes = drawn(model, img_shapes)
    frames, rows, columns = len(shapes) * shapes[0][0], *shapes[0][1:]
    return (rows, columns) if frames == 1 else (frames, rows, columns)


def reference_tokens(model: nn.Module, img_shapes: list) -> tuple[int, int]:
    tokens = sum(math.prod(shape) for shape in pictures(img_shapes))
    return 0, tokens - math.prod(grid(model, img_shapes))


# image_rotary_emb is a pair of tables: the image's and the text's
ROTARY: dict[str, Any] = {"rotary": (PerTokenArg("image_rotary_emb", inside=(0,)),)}

FAMILY = Family(
    name="qwen_image",
    covers="Qwen-Image, Qwen-Image-Edit, Qwen-Image-Layered",
    models=("QwenImageTransformer2DModel",),
    blocks=(
        Block(
            "QwenImageTransformerBlock",
            whole=Site(
                "joint",
                outputs=(1,),
                residual=True,
                features=normalised,
                follows=(PerTokenArg("modulate_index", axis=1),),
                **ROTARY,
            ),
            modules=(Site("self", "attn", outputs=(0,), **ROTARY), Site("mlp", "img_mlp")),
            # given a text mask, the attention processor builds a mask that is as long as the unmerged keys
            keys=(
                Site(
                    "kv",
                    "attn",
                    text_first=True,
                    keys_projections=("to_k", "to_v"),
                    weighed_inside=True,
                    mask="encoder_hidden_states_mask",
                    **ROTARY,
                ),
            ),
        ),
    ),
    grid_from="img_shapes",
    grid=grid,
    reference_tokens=reference_tokens,
    between_blocks=("controlnet_block_samples",),
    dimensions="2-D, 3-D",
    pipelines=("QwenImagePipeline",),
)
