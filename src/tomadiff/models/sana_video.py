"""Sana-Video: linear attention with rotary positions, and a convolutional MLP, which stays dense.

As in Sana, whole blocks and spans can't be merged, only modules in them.
"""

from __future__ import annotations

from .family import Block, Family, Site
from .wan import ROTARY, grid

FAMILY = Family(
    name="sana_video",
    covers="Sana-Video, LongSana",
    models=("SanaVideoTransformer3DModel",),
    blocks=(
        Block(
            "SanaVideoTransformerBlock",
            modules=(Site("self", "attn1", rotary=ROTARY), Site("cross", "attn2")),
            keys=(Site("kv", "attn1", keys_argument="encoder_hidden_states", rotary=ROTARY),),
        ),
    ),
    grid_from="hidden_states",
    grid=grid,
    dimensions="3-D",
    pipelines=("SanaVideoPipeline",),
)
