"""AnimateDiff and other image UNets with motion modules.

Spatial blocks take frames as samples of the batch, so each frame is merged on its own. Motion modules attend
over the few frames of one pixel; they stay dense on purpose.
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
