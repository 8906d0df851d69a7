"""Configurations of published models, so that they can be built at full size without a download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLWan,
    DDIMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    ModelMixin,
    SanaPipeline,
    SanaTransformer2DModel,
    SchedulerMixin,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)


@dataclass(frozen=True)
class Architecture:
    """A published model, without its weights."""

    title: str
    size: tuple[int, int]  # height and width of its images or frames, in pixels
    steps: int  # number of steps per generation in the paper
    pipeline: Callable[..., DiffusionPipeline]
    model: Callable[..., ModelMixin]
    vae: Callable[..., ModelMixin]
    scheduler: Callable[[], SchedulerMixin]
    config: dict[str, Any]  # the model's config

    def at_depth(self, depth: float) -> dict[str, Any]:
        """The config with this share of the blocks, at least one of each kind."""
        if not 0 < depth <= 1:
            raise ValueError(f"depth must be above 0 and at most 1, got {depth}")

        def share(count: int) -> int:
            return max(1, round(count * depth))

        scaled = {
            "num_layers": share,
            "num_single_layers": share,
            "transformer_layers_per_block": lambda counts: tuple(map(share, counts)),
            "dual_attention_layers": lambda layers: layers[: share(len(layers))],
        }
        full = self.config
        config = {name: scaled[name](value) if name in scaled else value for name, value in full.items()}
        if depth < 1 and config == full:
            raise ValueError(f"depth={depth} leaves out no block of {self.title}: build it at depth 1")
        return config


SD_PIPELINE = partial(StableDiffusionPipeline, requires_safety_checker=False)
SD_VAE = partial(
    AutoencoderKL,
    block_out_channels=(128, 256, 512, 512),
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    layers_per_block=2,
    latent_channels=4,
    sample_size=512,
)
WIDE_VAE = partial(
    SD_VAE, latent_channels=16, use_quant_conv=False, use_post_quant_conv=False, sample_size=1024
)
# DDIM instead of the published PNDM (1.5) and Euler (SDXL): PNDM calls the model twice in one step, and Euler
# reads tensor values, which don't exist on the meta device.
SD_SCHEDULER = partial(
    DDIMScheduler,
    beta_start=0.00085,
    beta_end=0.012,
    beta_schedule="scaled_linear",
    steps_offset=1,
    clip_sample=False,
    set_alpha_to_one=False,
)
SD_UNET: dict[str, Any] = {
    "sample_size": 64,
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 1, 1, 1),
    "attention_head_dim": 8,  # in UNets, this is the number of heads
    "cross_attention_dim": 768,
}

ARCHITECTURES = {
    "sd15": Architecture(
        title="Stable Diffusion 1.5",
        size=(512, 512),
        steps=50,
        pipeline=SD_PIPELINE,
        model=UNet2DConditionModel,
        vae=SD_VAE,
        scheduler=SD_SCHEDULER,
        config=SD_UNET,
    ),
    "sd21": Architecture(
        title="Stable Diffusion 2.1",
        size=(768, 768),
        steps=50,
        pipeline=SD_PIPELINE,
        model=UNet2DConditionModel,
        vae=partial(SD_VAE, sample_size=768),
        scheduler=partial(SD_SCHEDULER, prediction_type="v_prediction"),
        config={
            **SD_UNET,
            "sample_size": 96,
            "attention_head_dim": (5, 10, 20, 20),
            "cross_attention_dim": 1024,
            "use_linear_projection": True,
        },
    ),
    "sdxl": Architecture(
        title="Stable Diffusion XL",
        size=(1024, 1024),
        steps=50,
        pipeline=StableDiffusionXLPipeline,
        model=UNet2DConditionModel,
        vae=partial(SD_VAE, sample_size=1024, scaling_factor=0.13025),
        scheduler=SD_SCHEDULER,
        config={
            "sample_size": 128,
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "layers_per_block": 2,
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
    ),
    "sd35-medium": Architecture(
        title="Stable Diffusion 3.5 Medium",
        size=(1024, 1024),
        steps=50,
        pipeline=StableDiffusion3Pipeline,
        model=SD3Transformer2DModel,
        vae=partial(WIDE_VAE, scaling_factor=1.5305, shift_factor=0.0609),
        scheduler=partial(FlowMatchEulerDiscreteScheduler, shift=3.0),
        config={
            "sample_size": 128,
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 24,
            "dual_attention_layers": tuple(range(13)),
            "num_attention_heads": 24,
            "attention_head_dim": 64,
            "caption_projection_dim": 1536,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 384,
            "qk_norm": "rms_norm",
        },
    ),
    "flux-dev": Architecture(
        title="Flux.1 dev",
        size=(1024, 1024),
        steps=35,
        pipeline=FluxPipeline,
        model=FluxTransformer2DModel,
        vae=partial(WIDE_VAE, scaling_factor=0.3611, shift_factor=0.1159),
        scheduler=partial(FlowMatchEulerDiscreteScheduler, shift=3.0, use_dynamic_shifting=True),
        config={
            "patch_size": 1,
            "in_channels": 64,
            "num_layers": 19,
            "num_single_layers": 38,
            "num_attention_heads": 24,
            "attention_head_dim": 128,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 768,
            "guidance_embeds": True,
            "axes_dims_rope": (16, 56, 56),
        },
    ),
    "sana": Architecture(
        title="Sana 1.6B",
        size=(1024, 1024),
        steps=20,
        pipeline=SanaPipeline,
        model=SanaTransformer2DModel,
        vae=partial(AutoencoderDC, scaling_factor=0.41407),
        scheduler=partial(FlowMatchEulerDiscreteScheduler, shift=3.0),
        config={
            "sample_size": 32,
            "patch_size": 1,
            "in_channels": 32,
            "out_channels": 32,
            "num_layers": 20,
            "num_attention_heads": 70,
            "attention_head_dim": 32,
            "num_cross_attention_heads": 20,
            "cross_attention_head_dim": 112,
            "cross_attention_dim": 2240,
            "caption_channels": 2304,
        },
    ),
    "wan-1.3b": Architecture(
        title="Wan 2.1 1.3B",
        size=(480, 832),
        steps=50,
        pipeline=WanPipeline,
        model=WanTransformer3DModel,
        vae=AutoencoderKLWan,
        scheduler=partial(
            UniPCMultistepScheduler, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        config={
            "patch_size": (1, 2, 2),
            "num_attention_heads": 12,
            "attention_head_dim": 128,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 4096,
            "freq_dim": 256,
            "ffn_dim": 8960,
            "num_layers": 30,
        },
    ),
}
