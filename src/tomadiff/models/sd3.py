"""Stable Diffusion 3 and 3.5: joint blocks, a separate text stream, learned positions.

Its attention takes no mask, so key weights can be added only in the attention call itself (`where="kv"`).
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
                Site("self", "attn2"),  # only in 3.5-medium's blocks with dual attention
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
