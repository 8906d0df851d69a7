"""The two embedded text-to-image pipelines, made of stock diffusers models: one like SDXL, one like Flux."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    ImagePipelineOutput,
    UNet2DConditionModel,
)
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from .data import PROMPTS, SIZE, to_images
from .text import WordEncoder, vocabulary

POSITION_CHANNELS = 16
DATA_VARIANCE = 0.6  # a guess (the emoji: variance 0.38, mean square 0.69); the UNet was trained with it
Window = tuple[slice, slice]  # rows and columns of the latents
WHOLE: Window = (slice(None), slice(None))


def positions(like: Tensor) -> Tensor:
    """[B, 16, H, W] sines and cosines of row and column, half a wave to 4 waves across the picture, for [B,
    C, H, W].

    The models get these next to the noisy latents, as an inpainting model gets its mask. Padding and rotary
    embeddings tell where a token is only indirectly, and in short training the models didn't learn to read
    layout from them.
    """
    (height, width), waves = like.shape[-2:], torch.tensor([0.5, 1, 2, 4]) * 2 * torch.pi
    rows = waves.outer((torch.arange(height) + 0.5) / height)
    columns = waves.outer((torch.arange(width) + 0.5) / width)
    rows = torch.cat([rows.sin(), rows.cos()])[:, :, None].expand(-1, -1, width)
    columns = torch.cat([columns.sin(), columns.cos()])[:, None, :].expand(-1, height, -1)
    return torch.cat([rows, columns]).to(like).expand(len(like), -1, -1, -1)


class EmojiPipeline(DiffusionPipeline, ABC):
    """Flow matching from noise to a picture, for any model that predicts a velocity."""

    _callback_tensor_inputs: ClassVar = ["latents"]
    latent_channels = 12
    size_multiple: int  # pixels

    text_encoder: WordEncoder
    scheduler: FlowMatchEulerDiscreteScheduler

    @abstractmethod
    def velocity(
        self, latents: Tensor, t: Tensor, sequence: Tensor, pooled: Tensor, window: Window = WHOLE
    ) -> Tensor:
        """d latents / dt at times `t` [B], 1 being pure noise; of a window, if that is all the model sees."""

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        height: int = SIZE,
        width: int = SIZE,
        num_inference_steps: int = 24,
        guidance_scale: float = 1.0,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, int, dict], dict] | None = None,
    ) -> ImagePipelineOutput | tuple:
        """Draw `prompt`; arguments and result as in diffusers. `guidance_scale` 1 is off."""
        if height % self.size_multiple or width % self.size_multiple or min(height, width) <= 0:
            raise ValueError(
                f"height and width must be multiples of {self.size_multiple}, got {height} x {width}"
            )
        if output_type not in ("pil", "np", "pt", "latent"):
            raise ValueError(f"output_type must be 'pil', 'np', 'pt' or 'latent', got {output_type!r}")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        prompts = [p for p in prompts for _ in range(num_images_per_prompt)]
        guided = guidance_scale > 1
        device, dtype = self._execution_device, self.text_encoder.dtype

        ids = self.text_encoder.tokenize(prompts + [""] * len(prompts) if guided else prompts)
        sequence, pooled = self.text_encoder(ids.to(device))
        shape = (len(prompts), self.latent_channels, height // 2, width // 2)
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=dtype)
        elif tuple(latents.shape) != shape:
            raise ValueError(f"latents must have shape {shape}, got {tuple(latents.shape)}")
        latents = latents.to(device, dtype)

        self._set_timesteps(num_inference_steps, device)
        timesteps = self.scheduler.timesteps
        draws = "generator" in inspect.signature(self.scheduler.step).parameters
        noise = {"generator": generator} if draws else {}  # for stochastic sampling
        self._num_timesteps = len(timesteps)
        with self.progress_bar(total=len(timesteps)) as progress:
            for i, timestep in enumerate(timesteps):
                batch = torch.cat([latents, latents]) if guided else latents
                t = (timestep / self.scheduler.config.num_train_timesteps).to(dtype).expand(len(batch))
                velocity = self.velocity(batch, t, sequence, pooled)
                if guided:
                    text, no_text = velocity.chunk(2)
                    velocity = no_text + guidance_scale * (text - no_text)
                latents = self.scheduler.step(velocity, timestep, latents, return_dict=False, **noise)[0]
                if callback_on_step_end is not None:
                    latents = callback_on_step_end(self, i, timestep, {"latents": latents})["latents"]
                progress.update()

        images = latents
        if output_type != "latent":
            images = VaeImageProcessor(vae_scale_factor=2).postprocess(
                to_images(latents.float()), output_type
            )
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _set_timesteps(self, steps: int, device: torch.device) -> None:
        """Equal steps from 1 down to 0; multistep solvers can't start at 1, and set their own."""
        takes = inspect.signature(self.scheduler.set_timesteps).parameters
        if "sigmas" in takes and not self.scheduler.config.get("use_flow_sigmas"):
            self.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=device)
        else:
            self.scheduler.set_timesteps(steps, device=device)

    @property
    def num_timesteps(self) -> int:
        return self._num_timesteps


class EmojiUNetPipeline(EmojiPipeline):
    """SDXL's shape: a UNet with transformer blocks at 32 x 32 and 16 x 16, deeper at the coarser one."""

    model_cpu_offload_seq = "text_encoder->unet"
    size_multiple = 4

    def __init__(
        self,
        unet: UNet2DConditionModel,
        text_encoder: WordEncoder,
        scheduler: FlowMatchEulerDiscreteScheduler,
    ) -> None:
        super().__init__()
        self.register_modules(unet=unet, text_encoder=text_encoder, scheduler=scheduler)

    @classmethod
    def untrained(cls) -> EmojiUNetPipeline:
        text_encoder = WordEncoder(vocabulary(PROMPTS))
        dim = text_encoder.config.dim
        unet = UNet2DConditionModel(
            sample_size=SIZE // 2,
            in_channels=cls.latent_channels + POSITION_CHANNELS,
            out_channels=cls.latent_channels,
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            block_out_channels=(64, 96),
            layers_per_block=1,
            norm_num_groups=4,  # more, smaller groups would erase where in the picture a window is
            transformer_layers_per_block=(1, 2),
            attention_head_dim=(2, 3),  # heads per level, each 32 wide
            cross_attention_dim=dim,
            use_linear_projection=True,
            resnet_time_scale_shift="scale_shift",  # not SDXL's, but text through it is learnt faster
            addition_embed_type="text_time",
            addition_time_embed_dim=16,
            projection_class_embeddings_input_dim=dim + 6 * 16,
        )
        # Cross-attention starts out almost uniform, and then takes long to find out which word vector is
        # about which place. Flux's normalised queries and keys have sharp attention from the start; larger
        # ones do the same here.
        with torch.no_grad():
            unet.conv_in.weight[:, cls.latent_channels :] *= 2
            unet.conv_out.weight *= 0
            for name, parameter in unet.named_parameters():
                if name.endswith(("attn2.to_q.weight", "attn2.to_k.weight")):
                    parameter *= 2.5
        return cls(unet, text_encoder, FlowMatchEulerDiscreteScheduler())

    def velocity(
        self, latents: Tensor, t: Tensor, sequence: Tensor, pooled: Tensor, window: Window = WHOLE
    ) -> Tensor:
        height, width = 2 * latents.shape[-2], 2 * latents.shape[-1]
        time_ids = latents.new_tensor([height, width, 0, 0, height, width]).expand(len(latents), -1)
        added = {"text_embeds": pooled, "time_ids": time_ids}
        inside = (..., *window)
        inputs = torch.cat([latents, positions(latents)], 1)[inside]
        output = self.unet(inputs, t * 1000, sequence, added_cond_kwargs=added, return_dict=False)[0]
        # A UNet is bad at handing its input through, which is most of a velocity at high t. So, as in EDM,
        # what the input tells by linear regression is added here; the model gives the rest at unit variance.
        t = t.view(-1, 1, 1, 1)
        variance = t**2 + (1 - t) ** 2 * DATA_VARIANCE
        known = (t - (1 - t) * DATA_VARIANCE) / variance * latents[inside]
        return known + (DATA_VARIANCE / variance).sqrt() * output


class EmojiFluxPipeline(EmojiPipeline):
    """Flux's shape: joint and single blocks with rotary positions on 32 x 32 = 1024 image tokens."""

    model_cpu_offload_seq = "text_encoder->transformer"
    size_multiple = 2

    def __init__(
        self,
        transformer: FluxTransformer2DModel,
        text_encoder: WordEncoder,
        scheduler: FlowMatchEulerDiscreteScheduler,
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, text_encoder=text_encoder, scheduler=scheduler)

    @classmethod
    def untrained(cls) -> EmojiFluxPipeline:
        text_encoder = WordEncoder(vocabulary(PROMPTS))
        dim = text_encoder.config.dim
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=cls.latent_channels + POSITION_CHANNELS,
            out_channels=cls.latent_channels,
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=dim,
            pooled_projection_dim=dim,
            guidance_embeds=False,
            axes_dims_rope=(8, 12, 12),
        )
        # diffusers leaves the gates random; starting every block as the identity, as DiT does, trains faster.
        for name, module in transformer.named_modules():
            if name.endswith(("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear")) or (
                name == "proj_out"
            ):
                torch.nn.init.zeros_(module.weight)
                torch.nn.init.zeros_(module.bias)
        return cls(transformer, text_encoder, FlowMatchEulerDiscreteScheduler())

    def velocity(
        self, latents: Tensor, t: Tensor, sequence: Tensor, pooled: Tensor, window: Window = WHOLE
    ) -> Tensor:
        inside = (..., *window)
        inputs = torch.cat([latents, positions(latents)], 1)[inside]
        rows, columns = (torch.arange(n)[w] for n, w in zip(latents.shape[-2:], window))
        img_ids = torch.cartesian_prod(torch.zeros(1).long(), rows, columns).to(latents)
        with self.transformer.cache_context("cond"):  # for diffusers' caches, as in its own pipelines
            velocity = self.transformer(
                inputs.flatten(2).transpose(1, 2),
                encoder_hidden_states=sequence,
                pooled_projections=pooled,
                timestep=t,
                img_ids=img_ids,
                txt_ids=img_ids.new_zeros(sequence.shape[1], 3),
                return_dict=False,
            )[0]
        return velocity.transpose(1, 2).unflatten(2, (len(rows), len(columns)))


PIPELINES: dict[str, type[EmojiPipeline]] = {"unet": EmojiUNetPipeline, "flux": EmojiFluxPipeline}


def load_pipeline(folder: str | Path) -> EmojiPipeline:
    """Load a saved embedded pipeline of either kind, in float32."""
    classes = {cls.__name__: cls for cls in PIPELINES.values()}
    name = DiffusionPipeline.load_config(folder)["_class_name"]
    return classes[name].from_pretrained(folder)
