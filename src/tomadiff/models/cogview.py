"""CogView 3-Plus, CogView 4 and GLM-Image: joint blocks whose attention projects text and image together.

So keys and values are merged after the projections. From CogView 4 on, the same MLP runs on the text and
then on the image, and a hook can't tell which one it gets. GLM-Image first encodes its references in separate
calls, which run dense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import latent_grid

if TYPE_CHECKING:
    from torch import Tensor, nn

ROTARY = (PerTokenArg("image_rotary_emb"),)
KEYS = (Site("kv", "attn1", keys_inside=True, text_first=True),)


def normalised(block: nn.Module, call: Call) -> Tensor:
    time = call["emb"] if "emb" in call else call["temb"]
    return block.norm1(call["hidden_states"], call["encoder_hidden_states"], time)[0]


def reads(call: Call) -> bool:
    caches = call.get("kv_caches")
    return caches is not None and caches[0].mode == "write"


def block(name: str) -> Block:
    return Block(
        name,
        whole=Site("joint", outputs=(0,), residual=True, features=normalised, rotary=ROTARY),
        modules=(Site("self", "attn1", outputs=(0,), rotary=ROTARY),),
        keys=KEYS,
    )


FAMILY = Family(
    name="cogview",
    covers="CogView 3-Plus, CogView 4, GLM-Image",
    models=(
        "CogView3PlusTransformer2DModel",
        "CogView4Transformer2DModel",
        "GlmImageTransformer2DModel",
    ),
    blocks=(
        Block(
            "CogView3PlusTransformerBlock",
            whole=Site("joint", outputs=(0,), residual=True, features=normalised),
            modules=(Site("self", "attn1", outputs=(0,)), Site("mlp", "ff", text_first=True)),
            keys=KEYS,
        ),
        block("CogView4TransformerBlock"),
        block("GlmImageTransformerBlock"),
    ),
    grid_from="hidden_states",
    grid=latent_grid,
    reads=reads,
    pipelines=("CogView3PlusPipeline", "CogView4Pipeline"),
)
