"""Z-Image: single blocks, the image before padding and text, per-sample complex rotary positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tomadiff.errors import UnsupportedModelError

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import weigh_by

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    scale = block.adaLN_modulation(call["adaln_input"])[:, None].chunk(4, dim=2)[0]
    return block.attention_norm1(call["x"]) * (1 + scale)


def grid(
    model: nn.Module, x: list[Tensor], patch_size: int | None, f_patch_size: int | None
) -> tuple[int, ...]:
    if isinstance(x[0], list):
        raise UnsupportedModelError(
            "Z-Image with references (omni mode) puts pictures at different places of the sequence for each "
            "sample, where they can't be merged: call tomadiff.remove first"
        )
    shapes = {tuple(latent.shape) for latent in x}
    if len(shapes) > 1:
        raise UnsupportedModelError(f"pictures of one size only can be merged together, not {shapes}")
    frames, rows, columns = shapes.pop()[1:]
    patch = patch_size or 2  # the default of the model's forward
    grid = (frames // (f_patch_size or 1), rows // patch, columns // patch)
    return grid if grid[0] > 1 else grid[1:]


ROTARY: dict[str, Any] = {"text_last": True, "rotary": (PerTokenArg("freqs_cis", axis=1, text_last=True),)}
ATTENTION: dict[str, Any] = ROTARY | {
    "follows": (PerTokenArg("attention_mask", axis=1, text_last=True),),
    "weigh_keys": weigh_by("attention_mask", axes=2),
}

FAMILY = Family(
    name="z_image",
    covers="Z-Image, Z-Image-Turbo",
    models=("ZImageTransformer2DModel",),
    blocks=(
        Block(
            "ZImageTransformerBlock",
            whole=Site(
                "single",
                tokens="x",
                residual=True,
                features=normalised,
                follows=(PerTokenArg("attn_mask", axis=1, text_last=True),),
                weigh_keys=weigh_by("attn_mask", axes=2),
                **ROTARY,
            ),
            modules=(
                Site("self", "attention", **ATTENTION),
                Site("mlp", "feed_forward", tokens="x", text_last=True),
            ),
            keys=(Site("kv", "attention", keys_projections=("to_k", "to_v"), **ATTENTION),),
        ),
    ),
    grid_from=("x", "patch_size", "f_patch_size"),
    grid=grid,
    dense=("context_refiner", "siglip_refiner"),
    between_blocks=("controlnet_block_samples",),
    time="t",
    ascending=True,
    pipelines=("ZImagePipeline",),
    output_sign=-1,
)
