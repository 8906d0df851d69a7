"""AuraFlow: joint blocks, then single blocks with the text first; learned positions.

Its attention takes no mask, so key weights can be added only in the attention call itself (`where="kv"`).
"""

from __future__ import annotations

from .family import Block, Family, Site
from .parts import ada_norm, latent_grid

KEYS = (Site("kv", "attn", text_first=True, keys_projections=("to_k", "to_v"), weighed_inside=True),)

FAMILY = Family(
    name="auraflow",
    covers="AuraFlow",
    models=("AuraFlowTransformer2DModel",),
    blocks=(
        Block(
            "AuraFlowJointTransformerBlock",
            whole=Site("joint", outputs=(1,), residual=True, features=ada_norm),
            modules=(Site("self", "attn", outputs=(0,)), Site("mlp", "ff", tokens="x")),
            keys=KEYS,
        ),
        Block(
            "AuraFlowSingleTransformerBlock",
            whole=Site("single", text_first=True, residual=True, features=ada_norm),
            modules=(Site("self", "attn", text_first=True), Site("mlp", "ff", tokens="x", text_first=True)),
            keys=KEYS,
        ),
    ),
    grid_from="hidden_states",
    grid=latent_grid,
    pipelines=("AuraFlowPipeline",),
)
