"""Stable Diffusion 3 and 3.5: joint blocks, text in a stream of its own, learned positions.

Its attention takes no mask, so that keys can be weighed only at its very call (`where="kv"`).
"""

from __future__ import annotations

from typing import Any

from .family import Block, Family, Site
from .parts import ada_norm, latent_grid

KEYS: dict[str, Any] = {"keys_projections": ("to_k", "to_v"), "weighed_inside": True}

FAMILY = Family(
    name="sd3",
    covers="Stable Diffusion 3, 3.5",
    models=("SD3Transformer2DModel",),
    blocks=(
        Block(
            "JointTransformerBlock",
            whole=Site("joint", outputs=(1,), residual=True, features=ada_norm),
            modules=(
                Site("self", "attn", outputs=(0,)),
                Site("self", "attn2"),  # in the blocks of 3.5-medium with dual attention
                Site("mlp", "ff"),
            ),
            keys=(
                Site("kv", "attn", text_last=True, **KEYS),
                Site("kv", "attn2", **KEYS),
            ),
        ),
    ),
    grid_from="hidden_states",
    grid=latent_grid,
    between_blocks=("block_controlnet_hidden_states", "skip_layers"),
    pipelines=("StableDiffusion3Pipeline",),
)
