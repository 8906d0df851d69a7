"""CogVideoX and ConsisID: joint blocks; text is a separate argument and comes first inside attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .family import Block, Call, Family, PerTokenArg, Site
from .parts import weigh_by

if TYPE_CHECKING:
    from torch import Tensor, nn


def normalised(block: nn.Module, call: Call) -> Tensor:
    return block.norm1(call["hidden_states"], call["encoder_hidden_states"], call["temb"])[0]


weigh_module_keys = weigh_by("attention_mask", axes=3, text="encoder_hidden_states")


def weigh_block_keys(call: Call, bias: Tensor) -> None:
    inside = {"encoder_hidden_states": call["encoder_hidden_states"]}
    weigh_module_keys(inside, bias)
    more = call.get("attention_kwargs") or {}
    call["attention_kwargs"] = {**more, "attention_mask": inside["attention_mask"]}


def grid(model: nn.Module, latents: Tensor) -> tuple[int, ...]:
    """Frames, rows and columns of a latent [B, F, C, H, W]."""
    frames, _, height, width = latents.shape[1:]
    patch = model.config.patch_size
    return -(-frames // (model.config.get("patch_size_t") or 1)), height // patch, width // patch


ROTARY = (PerTokenArg("image_rotary_emb"),)


def block(name: str, weigh_keys: Callable[[Call, Tensor], None] | None = None) -> Block:
    return Block(
        name,
        whole=Site(
            "joint",
            outputs=(0,),
            residual=True,
            rotary=ROTARY,
            features=normalised,
            weigh_keys=weigh_keys,
        ),
        modules=(
            Site(
                "self",
                "attn1",
                outputs=(0,),
                rotary=ROTARY,
                mask="attention_mask",
                weigh_keys=weigh_module_keys,
            ),
            Site("mlp", "ff", tokens=None, text_first=True),
        ),
        keys=(Site("kv", "attn1", keys_inside=True, text_first=True),),
    )


FAMILY = Family(
    name="cogvideox",
    covers="CogVideoX, ConsisID",
    models=("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"),
    # ConsisID's blocks don't pass arguments on to attention, so key weights can't reach it
    blocks=(block("CogVideoXBlock", weigh_block_keys), block("ConsisIDBlock")),
    grid_from="hidden_states",
    grid=grid,
    between_blocks=("id_cond",),  # ConsisID adds face features between blocks
    dimensions="3-D",
    pipelines=("CogVideoXPipeline",),
)
