"""HunyuanVideo 1.5: joint blocks; text after the video, with a mask of its own."""

from __future__ import annotations

from .family import Block, Family, PerTokenArg, Site
from .hunyuan_video import KEYS, grid
from .parts import ada_norm

FAMILY = Family(
    name="hunyuan_video15",
    covers="HunyuanVideo 1.5",
    models=("HunyuanVideo15Transformer3DModel",),
    blocks=(
        Block(
            "HunyuanVideo15TransformerBlock",
            whole=Site(
                "joint",
                outputs=(0,),
                residual=True,
                rotary=(PerTokenArg("freqs_cis"),),
                features=ada_norm,
            ),
            modules=(
                Site("self", "attn", outputs=(0,), rotary=(PerTokenArg("image_rotary_emb"),)),
                Site("mlp", "ff"),
            ),
            keys=KEYS,
        ),
    ),
    grid_from="hidden_states",
    grid=grid,
    dimensions="3-D",
    pipelines=("HunyuanVideo15Pipeline",),
)
