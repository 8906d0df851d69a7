"""Stable Video Diffusion: a UNet with alternating spatial and temporal blocks. Temporal blocks stay dense."""

from __future__ import annotations

from dataclasses import replace

from . import unet

FAMILY = replace(
    unet.FAMILY,
    name="svd",
    covers="Stable Video Diffusion",
    models=("UNetSpatioTemporalConditionModel",),
    skips=True,  # temporal blocks run in between
    dimensions="2-D, by frame",
    pipelines=("StableVideoDiffusionPipeline",),
)
