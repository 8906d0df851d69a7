"""HiDream: joint blocks, then single blocks; text last, and different text tokens in each block.

Images that are not square are padded at the end. Rotary positions are 2 x 2 matrices that queries and keys
share, so keys are merged after them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import latent_grid, modulated

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    shift, scale, *_ = block.adaLN_modulation(call["temb"])[:, None].split(call["temb"].shape[-1], dim=-1)
    return modulated(block.norm1_i(call["hidden_states"]), shift, scale)


def grid(model: nn.Module, latent: Tensor, img_sizes: Tensor) -> tuple[int, ...]:
    """If the latent is already cut into patches, img_sizes has the numbers of rows and columns."""
    return latent_grid(model, latent) if latent.ndim == 4 else tuple(int(side) for side in img_sizes[0])


SEQUENCE: dict[str, Any] = {
    "text_last": True,
    "rotary": (PerTokenArg("image_rotary_emb", axis=1, text_last=True),),
    "follows": (PerTokenArg("hidden_states_masks", axis=1, text_last=True),),
}
WHOLE: dict[str, Any] = SEQUENCE | {"residual": True, "features": normalised}
ATTENTION: dict[str, Any] = SEQUENCE | {"tokens": "norm_hidden_states"}
KEYS = (Site("kv", "attn1", tokens="norm_hidden_states", keys_inside=True, text_last=True),)
MLP = Site("mlp", "ff_i", tokens=None, text_last=True)

FAMILY = Family(
    name="hidream",
    covers="HiDream-I1",
    models=("HiDreamImageTransformer2DModel",),
    blocks=(
        Block(
            "HiDreamImageTransformerBlock",
            whole=Site("joint", outputs=(0,), **WHOLE),
            modules=(Site("self", "attn1", outputs=(0,), **ATTENTION), MLP),
            keys=KEYS,
        ),
        Block(
            "HiDreamImageSingleTransformerBlock",
            whole=Site("single", **WHOLE),
            modules=(Site("self", "attn1", **ATTENTION), MLP),
            keys=KEYS,
        ),
    ),
    grid_from=("hidden_states", "img_sizes"),
    grid=grid,
    skips=True,  # after each single block, the text tokens at the end are replaced
    time="timesteps",
    pipelines=("HiDreamImagePipeline",),
    output_sign=-1,
)
