"""ERNIE-Image: single blocks, text last. Between modules, tokens have the shape [S, B, C].

Only attention takes them batch first, so only attention can be merged.
"""

from __future__ import annotations

from .family import Block, Family, PerTokenArg, Site
from .parts import latent_grid, weigh_by

FAMILY = Family(
    name="ernie_image",
    covers="ERNIE-Image",
    models=("ErnieImageTransformer2DModel",),
    blocks=(
        Block(
            "ErnieImageSharedAdaLNBlock",
            modules=(
                Site(
                    "self",
                    "self_attention",
                    text_last=True,
                    rotary=(PerTokenArg("image_rotary_emb", axis=1, text_last=True),),
                    follows=(PerTokenArg("attention_mask", axis=3, text_last=True),),
                    weigh_keys=weigh_by("attention_mask"),
                ),
            ),
            keys=(Site("kv", "self_attention", keys_inside=True, text_last=True),),
        ),
    ),
    grid_from="hidden_states",
    grid=latent_grid,
    pipelines=("ErnieImagePipeline",),
)
