"""OmniGen: a language model's blocks; text, references and time first, then the image; query-by-key masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import latent_grid

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    return block.input_layernorm(call["hidden_states"])


ROTARY = (PerTokenArg("image_rotary_emb"),)
QUERIES, KEYS = PerTokenArg("attention_mask", axis=2), PerTokenArg("attention_mask", axis=3)
SEQUENCE: dict[str, Any] = {"text_first": True, "rotary": ROTARY, "follows": (QUERIES, KEYS)}

FAMILY = Family(
    name="omnigen",
    covers="OmniGen",
    models=("OmniGenTransformer2DModel",),
    blocks=(
        Block(
            "OmniGenBlock",
            whole=Site("single", residual=True, features=normalised, **SEQUENCE),
            modules=(
                Site("self", "self_attn", companion_args=("encoder_hidden_states",), **SEQUENCE),
                Site("mlp", "mlp", text_first=True),
            ),
            keys=(
                Site(
                    "kv",
                    "self_attn",
                    text_first=True,
                    rotary=ROTARY,
                    follows=(KEYS,),
                    keys_argument="encoder_hidden_states",
                    weighed_inside=True,
                ),
            ),
        ),
    ),
    grid_from="hidden_states",
    grid=latent_grid,
    ascending=True,
)
