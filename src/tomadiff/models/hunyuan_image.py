"""HunyuanImage: joint, then single blocks with the text last; rotary positions on the image only; a mask.

Single blocks project text and image together, so keys and values are merged after the projections.
"""

from __future__ import annotations

from typing import Any

from .family import Block, Family, PerTokenArg, Site
from .flux import single_normalised
from .parts import ada_norm, latent_grid

SEQUENCE: dict[str, Any] = {
    "outputs": (0,),
    "rotary": (PerTokenArg("image_rotary_emb"),),
    "follows": (PerTokenArg("attention_mask", axis=3, text_last=True),),
}

KEYS = (Site("kv", "attn", keys_inside=True, text_last=True),)

FAMILY = Family(
    name="hunyuan_image",
    covers="HunyuanImage 2.1 and its refiner",
    models=("HunyuanImageTransformer2DModel",),
    blocks=(
        Block(
            "HunyuanImageTransformerBlock",
            whole=Site("joint", residual=True, features=ada_norm, **SEQUENCE),
            modules=(Site("self", "attn", **SEQUENCE), Site("mlp", "ff")),
            keys=KEYS,
        ),
        Block(
            "HunyuanImageSingleTransformerBlock",
            whole=Site("single", residual=True, features=single_normalised, **SEQUENCE),
            modules=(
                Site("self", "attn", **SEQUENCE),
                Site("mlp", "proj_mlp", tokens=None, text_last=True),
            ),
            keys=KEYS,
            joined=True,
        ),
    ),
    grid_from="hidden_states",
    grid=latent_grid,
    pipelines=("HunyuanImagePipeline",),
)
