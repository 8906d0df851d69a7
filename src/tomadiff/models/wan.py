"""Wan 2.1 and 2.2: blocks on a grid of time, height and width; rotary tables with a batch axis.

In Wan 2.2 TI2V every token has its own timestep and modulation. VACE's hints and Animate's face features are
added between blocks; the modules that compute them stay dense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import modulated, weigh_by

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    """temb: [B, 6, C], or [B, N, 6, C] with one entry per token."""
    table, temb = block.scale_shift_table, call["temb"].float()
    modulation = table.unsqueeze(0) + temb if temb.ndim == 4 else (table + temb).unsqueeze(1)
    return modulated(block.norm1(call["hidden_states"].float()), modulation[:, :, 0], modulation[:, :, 1])


def grid(model: nn.Module, latents: Tensor) -> tuple[int, ...]:
    """Frames, rows and columns of the patches of a latent [B, C, F, H, W]."""
    return tuple(side // patch for side, patch in zip(latents.shape[-3:], model.config.patch_size))


ROTARY = (PerTokenArg("rotary_emb", axis=1),)
ATTENTION: dict[str, Any] = {
    "rotary": ROTARY,
    "mask": "attention_mask",
    "weigh_keys": weigh_by("attention_mask"),
}

FAMILY = Family(
    name="wan",
    covers="Wan 2.1, 2.2, VACE, Animate, ChronoEdit",
    models=(
        "WanTransformer3DModel",
        "WanVACETransformer3DModel",
        "WanAnimateTransformer3DModel",
        "ChronoEditTransformer3DModel",
    ),
    blocks=(
        Block(
            "WanTransformerBlock",
            whole=Site(
                "block",
                residual=True,
                rotary=ROTARY,
                follows=(PerTokenArg("temb", axis=1, ndim=4),),
                features=normalised,
            ),
            modules=(Site("self", "attn1", **ATTENTION), Site("cross", "attn2"), Site("mlp", "ffn")),
            keys=(
                Site(
                    "kv",
                    "attn1",
                    keys_argument="encoder_hidden_states",
                    weighed_inside=True,
                    **ATTENTION,
                ),
            ),
        ),
    ),
    grid_from="hidden_states",
    grid=grid,
    between_blocks=("control_hidden_states", "face_pixel_values"),
    dimensions="3-D",
    pipelines=("WanPipeline",),
)
