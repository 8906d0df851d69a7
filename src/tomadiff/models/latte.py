"""Latte: PixArt's blocks, in space and over time by turns.

Those in space see one frame each, so frames are samples of a batch, and each is merged for itself. Those over
time see the frames of a single place, and stay dense.
"""

from __future__ import annotations

from dataclasses import replace

from . import pixart

FAMILY = replace(
    pixart.FAMILY,
    name="latte",
    covers="Latte",
    models=("LatteTransformer3DModel",),
    dense=("temporal_transformer_blocks",),
    between_blocks=(),
    skips=True,  # to blocks over time
    dimensions="2-D, by frame",
    pipelines=("LattePipeline",),
)
