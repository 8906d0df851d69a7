"""AnimateDiff and other UNets of images with motion in between.

Their blocks in space see one frame each, so frames are samples of a batch, and each is merged for itself.
What attends over time sees a few frames for every pixel: that stays dense on purpose.
"""

from __future__ import annotations

from dataclasses import replace

from . import unet

FAMILY = replace(
    unet.FAMILY,
    name="animatediff",
    covers="AnimateDiff, ModelScope, ZeroScope, I2VGen-XL",
    models=("UNetMotionModel", "UNet3DConditionModel", "I2VGenXLUNet"),
    dense=("motion_modules", "temp_attentions", "transformer_in", "image_latents_temporal_encoder"),
    dimensions="2-D, by frame",
    pipelines=("AnimateDiffPipeline",),
)
