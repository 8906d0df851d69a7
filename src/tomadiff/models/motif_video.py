"""Motif-Video: HunyuanVideo's blocks, some with cross-attention; the last blocks may form a decoder."""

from __future__ import annotations

from dataclasses import replace

from .family import Block, Family, PerTokenArg
from .hunyuan_video import JOINT, JOINT_BLOCK, SINGLE, SINGLE_BLOCK, grid

FAMILY = Family(
    name="motif_video",
    covers="Motif-Video",
    models=("MotifVideoTransformer3DModel",),
    blocks=(
        Block(
            "MotifVideoTransformerBlock",
            whole=replace(JOINT_BLOCK, rotary=(PerTokenArg("image_rotary_emb"),)),
            **JOINT,
        ),
        Block("MotifVideoSingleTransformerBlock", whole=SINGLE_BLOCK, **SINGLE),
    ),
    grid_from="hidden_states",
    grid=grid,
    skips=True,  # the encoder's output, with all tokens, becomes the decoder's second stream
    dimensions="3-D",
)
