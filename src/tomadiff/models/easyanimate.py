"""EasyAnimate 5: joint blocks; text is a separate argument."""

from __future__ import annotations

from .cogvideox import normalised
from .family import Block, Family, PerTokenArg, Site
from .mochi import grid

ROTARY = (PerTokenArg("image_rotary_emb"),)

FAMILY = Family(
    name="easyanimate",
    covers="EasyAnimate",
    models=("EasyAnimateTransformer3DModel",),
    blocks=(
        Block(
            "EasyAnimateTransformerBlock",
            whole=Site("joint", outputs=(0,), residual=True, rotary=ROTARY, features=normalised),
            modules=(Site("self", "attn1", outputs=(0,), rotary=ROTARY), Site("mlp", "ff")),
            keys=(Site("kv", "attn1", keys_inside=True, text_first=True),),
        ),
    ),
    grid_from="hidden_states",
    grid=grid,
    dimensions="3-D",
    pipelines=("EasyAnimatePipeline",),
)
