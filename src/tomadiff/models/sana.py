"""Sana: linear attention, and a convolutional MLP, which needs all tokens on their grid and stays dense.

So whole blocks and spans can't be merged, only modules in them. Linear attention takes no mask.
"""

from __future__ import annotations

from .family import Block, Family, Site
from .parts import latent_grid

FAMILY = Family(
    name="sana",
    covers="Sana, Sana-Sprint",
    models=("SanaTransformer2DModel",),
    blocks=(
        Block(
            "SanaTransformerBlock",
            modules=(Site("self", "attn1"), Site("cross", "attn2")),
            keys=(Site("kv", "attn1", keys_argument="encoder_hidden_states"),),
        ),
    ),
    grid_from="hidden_states",
    grid=latent_grid,
    pipelines=("SanaPipeline",),
)
