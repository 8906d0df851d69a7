"""JoyImage-Edit: joint blocks; the generated image first, then references of the same size, never merged.

It computes queries, keys and values in one projection, so keys and values are merged after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import latent_grid, modulated

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    shift, scale, *_ = block.img_mod(call["temb"])
    return modulated(block.img_norm1(call["hidden_states"]), shift[:, None], scale[:, None])


def grid(model: nn.Module, latent: Tensor) -> tuple[int, ...]:
    frames, *sides = latent_grid(model, latent)
    return tuple(sides) if frames == 1 else (frames, *sides)


def reference_tokens(model: nn.Module, latent: Tensor) -> tuple[int, int]:
    """Of the n latents in [B, n, C, T, H, W], the last one is generated; the model moves it to the front."""
    frames, rows, columns = latent_grid(model, latent)
    return 0, (latent.shape[1] - 1) * frames * rows * columns if latent.ndim == 6 else 0


ROTARY: dict[str, Any] = {"outputs": (0,), "rotary": (PerTokenArg("image_rotary_emb", inside=(0,)),)}

FAMILY = Family(
    name="joy_image",
    covers="JoyImage-Edit",
    models=("JoyImageEditTransformer3DModel",),
    blocks=(
        Block(
            "JoyImageTransformerBlock",
            whole=Site("joint", residual=True, features=normalised, **ROTARY),
            modules=(Site("self", "attn", **ROTARY), Site("mlp", "img_mlp")),
            keys=(Site("kv", "attn", keys_inside=True, text_last=True),),
        ),
    ),
    grid_from="hidden_states",
    grid=grid,
    reference_tokens=reference_tokens,
)
