"""LTX-Video: blocks on a grid of time, height and width; each token may have its own timestep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import modulated, weigh_by

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    """temb: [B, 1 or N, 6 * C]"""
    modulation = block.scale_shift_table + call["temb"].unflatten(-1, (len(block.scale_shift_table), -1))
    return modulated(block.norm1(call["hidden_states"]), modulation[:, :, 0], modulation[:, :, 1])


def drawn(coords: Tensor) -> tuple[int, tuple[int, ...]]:
    """The index at which the video starts, after conditioning frames, and its grid, from token coordinates.

    coords: [B, 3, S]. Only the video itself starts at the earliest time. Synchronises the device.
    """
    times, rows, columns = coords[0].unbind(0)
    start = int((times == times.min()).nonzero()[0])
    height, width = (len(axis[start:].unique()) for axis in (rows, columns))
    return start, ((len(times) - start) // (height * width), height, width)


def grid(model: nn.Module, frames: int, height: int, width: int, coords: Tensor | None) -> tuple[int, ...]:
    """Pipelines pass either coordinates or the three sides."""
    return (frames, height, width) if coords is None else drawn(coords)[1]


def reference_tokens(
    model: nn.Module, frames: object, height: object, width: object, coords: Tensor | None
) -> tuple[int, int]:
    return (0 if coords is None else drawn(coords)[0], 0)


ROTARY = (PerTokenArg("image_rotary_emb", axis=1),)
ATTENTION: dict[str, Any] = {
    "rotary": ROTARY,
    "mask": "attention_mask",
    "weigh_keys": weigh_by("attention_mask", axes=3),
}

FAMILY = Family(
    name="ltx",
    covers="LTX-Video",
    models=("LTXVideoTransformer3DModel",),
    blocks=(
        Block(
            "LTXVideoTransformerBlock",
            whole=Site(
                "block",
                residual=True,
                rotary=ROTARY,
                follows=(PerTokenArg("temb", axis=1),),
                features=normalised,
            ),
            modules=(Site("self", "attn1", **ATTENTION), Site("cross", "attn2"), Site("mlp", "ff")),
            keys=(Site("kv", "attn1", keys_argument="encoder_hidden_states", **ATTENTION),),
        ),
    ),
    grid_from=("num_frames", "height", "width", "video_coords"),
    grid=grid,
    reference_tokens=reference_tokens,
    dimensions="3-D",
    pipelines=("LTXPipeline",),
)
