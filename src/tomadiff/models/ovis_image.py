"""Ovis-Image: Flux's blocks with gated MLPs."""

from __future__ import annotations

from . import flux
from .family import Family

FAMILY = Family(
    name="ovis_image",
    covers="Ovis-Image",
    models=("OvisImageTransformer2DModel",),
    blocks=flux.blocks("OvisImage"),
    pipelines=("OvisImagePipeline",),
    **flux.PICTURES,
)
