"""Stable Diffusion 3 and 3.5: joint blocks, text in a stream of its own, learned positions.

Its attention takes no mask, so keys can't be weighed.
"""

from __future__ import annotations

from torch import Tensor, nn

from .family import Block, Call, Family, Site


def normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm1(call["hidden_states"], emb=call["temb"])[0]


FAMILY = Family(
    name="sd3",
    covers="Stable Diffusion 3, 3.5",
    models=("SD3Transformer2DModel",),
    blocks=(
        Block(
            "JointTransformerBlock",
            whole=Site("joint", outputs=(1,), residual=True, features=normalised),
            modules=(
                Site("self", "attn", outputs=(0,)),
                Site("self", "attn2"),  # in the blocks of 3.5-medium with dual attention
                Site("mlp", "ff"),
            ),
            keys=(
                Site("kv", "attn", keys_projections=("to_k", "to_v")),
                Site("kv", "attn2", keys_projections=("to_k", "to_v")),
            ),
        ),
    ),
    grid_from="hidden_states",
    grid=lambda model, latent: tuple(side // model.config.patch_size for side in latent.shape[-2:]),
    between_blocks=("block_controlnet_hidden_states", "skip_layers"),
)
