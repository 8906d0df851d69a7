"""LongCat-Image and its edit model: Flux's blocks."""

from __future__ import annotations

from . import flux
from .family import Family

FAMILY = Family(
    name="longcat_image",
    covers="LongCat-Image, LongCat-Image-Edit",
    models=("LongCatImageTransformer2DModel",),
    blocks=flux.blocks("LongCatImage"),
    **flux.PICTURES,
    pipelines=("LongCatImagePipeline",),
)
