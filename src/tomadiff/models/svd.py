"""Stable Video Diffusion: a UNet whose blocks in space and over time take turns. The latter stay dense."""

from __future__ import annotations

from dataclasses import replace

from . import unet

FAMILY = replace(
    unet.FAMILY,
    name="svd",
    covers="Stable Video Diffusion",
    models=("UNetSpatioTemporalConditionModel",),
    skips=True,  # to blocks over time
    dimensions="2-D, by frame",
    pipelines=("StableVideoDiffusionPipeline",),
)
