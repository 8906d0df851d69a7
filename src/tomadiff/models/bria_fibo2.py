"""Bria Fibo 2: single blocks; gist tokens of the text first, references last; complex rotary positions.

If the prompts of a batch have different numbers of gist tokens, these come last instead, with a mask.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import latent_grid

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    scale = block.adaLN_modulation(call["adaln_noisy"])[:, None].chunk(4, dim=2)[0]
    return block.attention_norm1(call["x"]) * (1 + scale)


def grid(model: nn.Module, latent: Tensor, context: list[Tensor] | None) -> tuple[int, ...]:
    return latent_grid(model, latent)


def reference_tokens(model: nn.Module, latent: Tensor, context: list[Tensor] | None) -> tuple[int, int]:
    return 0, sum(math.prod(latent_grid(model, reference)) for reference in context or ())


SEQUENCE: dict[str, Any] = {
    "text_first": True,
    "rotary": (PerTokenArg("freqs_cis", axis=1),),
    "unmasked": "draw prompts of different lengths one by one",
}
ATTENTION: dict[str, Any] = SEQUENCE | {"mask": "attention_mask"}

FAMILY = Family(
    name="bria_fibo2",
    covers="Bria Fibo 2",
    models=("BriaFibo2Transformer2DModel",),
    blocks=(
        Block(
            "BriaFibo2TransformerBlock",
            whole=Site(
                "single",
                tokens="x",
                residual=True,
                features=normalised,
                follows=(PerTokenArg("noise_mask", axis=1),),
                mask="attn_mask",
                **SEQUENCE,
            ),
            modules=(
                Site("self", "attention", **ATTENTION),
                Site("cross", "cross_attention", text_first=True),
                Site("mlp", "feed_forward", tokens="x", text_first=True),
            ),
            keys=(
                Site(
                    "kv",
                    "attention",
                    keys_argument="encoder_hidden_states",
                    weighed_inside=True,
                    **ATTENTION,
                ),
            ),
        ),
    ),
    grid_from=("hidden_states", "context_latents"),
    grid=grid,
    reference_tokens=reference_tokens,
    pipelines=("BriaFibo2Pipeline",),
)
