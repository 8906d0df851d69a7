"""Latte: PixArt's blocks, alternately spatial and temporal.

Spatial blocks take frames as samples of the batch, so each frame is merged on its own. Temporal blocks attend
over the frames of one position, and stay dense.
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
    skips=True,  # temporal blocks run in between
    dimensions="2-D, by frame",
    pipelines=("LattePipeline",),
)
