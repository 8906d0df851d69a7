"""The embedded text-to-image pipelines, made of stock diffusers models: one like SDXL, one like Flux."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import (
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    ImagePipelineOutput,
    SchedulerMixin,
    UNet2DConditionModel,
)
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from .codec import CHANNELS, PATCH, PatchCodec
from .prompts import vocabulary
from .text import WordEncoder

SIZE = 128  # pixels per side of a picture
WAVES = (0.5, 1.0, 2.0, 4.0, 8.0)  # across the picture, for `positions`
POSITION_CHANNELS = 4 * len(WAVES)
# SDXL's. The last two are not for its own scheduler, but for others that are made from this one.
SCHEDULE: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "timestep_spacing": "leading",
    "steps_offset": 1,
    "clip_sample": False,
    "set_alpha_to_one": False,
}
TRAIN_TIMESTEPS: int = SCHEDULE["num_train_timesteps"]
Window = tuple[slice, slice]  # rows and columns of the latents
WHOLE: Window = (slice(None), slice(None))


def positions(like: Tensor) -> Tensor:
    """[B, 20, H, W] sines and cosines of row and column, half a wave to 8 waves across the picture, for [B,
    C, H, W].

    The models get these next to the noisy latents, as an inpainting model gets its mask. Padding and rotary
    embeddings tell where a token is only indirectly, and in short training the models didn't learn to read
    layout from them.
    """
    (height, width), waves = like.shape[-2:], torch.tensor(WAVES) * 2 * torch.pi
    rows = waves.outer((torch.arange(height) + 0.5) / height)
    columns = waves.outer((torch.arange(width) + 0.5) / width)
    rows = torch.cat([rows.sin(), rows.cos()])[:, :, None].expand(-1, -1, width)
    columns = torch.cat([columns.sin(), columns.cos()])[:, None, :].expand(-1, height, -1)
    return torch.cat([rows, columns]).to(like).expand(len(like), -1, -1, -1)


# What does not change from step to step is the same tensor in every step, as in diffusers' pipelines.


@functools.lru_cache
def _time_ids(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """SDXL's size, crop and target size, in pixels."""
    height, width = PATCH * rows, PATCH * columns
    return torch.tensor([height, width, 0, 0, height, width], device=device, dtype=dtype)


@functools.lru_cache
def _image_ids(rows: range, columns: range, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Flux's positions of image tokens, [N, 3]."""
    ids = torch.cartesian_prod(torch.zeros(1).long(), torch.tensor(rows), torch.tensor(columns))
    return ids.to(device, dtype)


@functools.lru_cache
def _text_ids(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.zeros(length, 3, device=device, dtype=dtype)


class EmojiPipeline(DiffusionPipeline, ABC):
    """From noise to a picture, for any model of the noise in noisy latents.

    Models work on latents and return corrections at unit variance, channel by channel. What a noisy latent
    tells about the noise by linear regression is worked out here and added, as in EDM, since to hand its
    input through is what a small network is worst at.
    """

    _callback_tensor_inputs: ClassVar = ["latents"]
    size_multiple: int  # pixels

    text_encoder: WordEncoder
    codec: PatchCodec
    scheduler: SchedulerMixin

    @abstractmethod
    def signal_and_noise(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The shares of picture and noise in latents at times `t`."""

    @abstractmethod
    def correction(
        self, scaled: Tensor, t: Tensor, sequence: Tensor, pooled: Tensor, window: Window = WHOLE
    ) -> Tensor:
        """The model's output, for latents at unit variance and times `t` [B]; of a window, if that is all
        the model sees."""

    @abstractmethod
    def predict(self, latents: Tensor, t: Tensor, sequence: Tensor, pooled: Tensor) -> Tensor:
        """What the scheduler wants to know about latents at times `t` [B]."""

    @abstractmethod
    def output_terms(self, timesteps: Tensor) -> tuple[Tensor, ...]:
        """`channel_terms` at the scheduler's timesteps, to be multiplied with inputs and outputs."""

    @abstractmethod
    def set_timesteps(self, steps: int, device: torch.device) -> Tensor:
        """Prepare the scheduler; returns its timesteps."""

    def noise_estimate(
        self, latents: Tensor, t: Tensor, sequence: Tensor, pooled: Tensor, window: Window = WHOLE
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`latents` of the window at unit variance, the model's correction to what they tell of the noise,
        and their deviation [B, C, 1, 1]."""
        signal, noise = (share.float().view(-1, 1, 1, 1) for share in self.signal_and_noise(t))
        spread = self.codec.deviation.float()[:, None, None]
        deviation = torch.hypot(signal * spread, noise).to(latents.dtype)
        scaled = latents / deviation
        correction = self.correction(scaled, t, sequence, pooled, window)
        seen = (..., *window)
        return scaled[seen], correction, deviation

    def channel_terms(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """For `output_terms`, which tomadiff asks for: the model's correction at times `t` is the first times
        what it sees, plus the second times the clean latents. [steps, C] each."""
        signal, noise = (share.float()[:, None] for share in self.signal_and_noise(t))
        spread = self.codec.deviation.float()
        return signal * spread / noise, -torch.hypot(signal * spread, noise) / (noise * spread)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        height: int = SIZE,
        width: int = SIZE,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, int, dict], dict] | None = None,
    ) -> ImagePipelineOutput | tuple:
        """Draw `prompt`; arguments and result as in diffusers. `guidance_scale` 1 is off.

        Steps and guidance are by default `default_steps` and `default_guidance` of its config.
        """
        if height % self.size_multiple or width % self.size_multiple or min(height, width) <= 0:
            raise ValueError(
                f"height and width must be multiples of {self.size_multiple}, got {height} x {width}"
            )
        if output_type not in ("pil", "np", "pt", "latent"):
            raise ValueError(f"output_type must be 'pil', 'np', 'pt' or 'latent', got {output_type!r}")
        steps = self.config.default_steps if num_inference_steps is None else num_inference_steps
        scale = self.config.default_guidance if guidance_scale is None else guidance_scale
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        prompts = [p for p in prompts for _ in range(num_images_per_prompt)]
        guided = scale > 1
        device, dtype = self._execution_device, self.text_encoder.dtype

        ids = self.text_encoder.tokenize(prompts + [""] * len(prompts) if guided else prompts)
        sequence, pooled = self.text_encoder(ids.to(device))
        timesteps = self.set_timesteps(steps, device)
        shape = (len(prompts), CHANNELS, height // PATCH, width // PATCH)
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=dtype)
        elif tuple(latents.shape) != shape:
            raise ValueError(f"latents must have shape {shape}, got {tuple(latents.shape)}")
        latents = latents.to(device, dtype) * getattr(self.scheduler, "init_noise_sigma", 1.0)
        accepted = inspect.signature(self.scheduler.step).parameters
        options = {k: v for k, v in {"eta": eta, "generator": generator}.items() if k in accepted}

        self._num_timesteps = len(timesteps)
        with self.progress_bar(total=len(timesteps)) as progress:
            for i, timestep in enumerate(timesteps):
                batch = torch.cat([latents, latents]) if guided else latents
                if hasattr(self.scheduler, "scale_model_input"):
                    batch = self.scheduler.scale_model_input(batch, timestep)
                predicted = self.predict(batch, timestep.expand(len(batch)), sequence, pooled)
                if guided:
                    text, no_text = predicted.chunk(2)
                    predicted = no_text + scale * (text - no_text)
                latents = self.scheduler.step(predicted, timestep, latents, **options, return_dict=False)[0]
                latents = latents.to(dtype)
                if callback_on_step_end is not None:
                    latents = callback_on_step_end(self, i, timestep, {"latents": latents})["latents"]
                progress.update()

        images = latents
        if output_type != "latent":
            images = VaeImageProcessor(vae_scale_factor=PATCH).postprocess(
                self.codec.decode(latents.float()), output_type
            )
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    @property
    def num_timesteps(self) -> int:
        return self._num_timesteps


class EmojiUNetPipeline(EmojiPipeline):
    """SDXL's shape: a UNet with transformer blocks at 32 x 32 and 16 x 16, deeper at the coarser one.

    It predicts epsilon on SDXL's noise schedule, so that any scheduler of diffusers for SDXL fits.
    """

    model_cpu_offload_seq = "text_encoder->unet->codec"
    size_multiple = 2 * PATCH

    def __init__(
        self,
        unet: UNet2DConditionModel,
        text_encoder: WordEncoder,
        codec: PatchCodec,
        scheduler: SchedulerMixin,
        default_steps: int = 24,
        default_guidance: float = 2.0,
    ) -> None:
        super().__init__()
        self.register_modules(unet=unet, text_encoder=text_encoder, codec=codec, scheduler=scheduler)
        self.register_to_config(default_steps=default_steps, default_guidance=default_guidance)
        ends = SCHEDULE["beta_start"] ** 0.5, SCHEDULE["beta_end"] ** 0.5
        betas = torch.linspace(*ends, TRAIN_TIMESTEPS, dtype=torch.float64) ** 2
        self._log_signal = (1 - betas).log().cumsum(0) / 2

    @classmethod
    def untrained(cls, codec: PatchCodec, **changes: Any) -> EmojiUNetPipeline:
        text_encoder = WordEncoder(vocabulary())
        dim = text_encoder.config.dim
        settings: dict[str, Any] = {
            "sample_size": SIZE // PATCH,
            "in_channels": CHANNELS + POSITION_CHANNELS,
            "out_channels": CHANNELS,
            "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            "block_out_channels": (96, 96),
            "layers_per_block": 1,
            "norm_num_groups": 4,  # more, smaller groups would erase where in the picture a window is
            "transformer_layers_per_block": (2, 3),
            "attention_head_dim": 3,  # heads, each 32 wide
            "cross_attention_dim": dim,
            "use_linear_projection": True,
            "resnet_time_scale_shift": "scale_shift",  # not SDXL's, but text through it is learnt faster
            "time_embedding_dim": 256,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 16,
            "projection_class_embeddings_input_dim": dim + 6 * 16,
        }
        unet = UNet2DConditionModel(**settings | changes)
        # Cross-attention starts out almost uniform, and then takes long to find out which word vector is
        # about which place. Flux's normalised queries and keys have sharp attention from the start; larger
        # ones do the same here.
        with torch.no_grad():
            unet.conv_in.weight[:, CHANNELS:] *= 2
            unet.conv_out.weight *= 0
            for name, parameter in unet.named_parameters():
                if name.endswith(("attn2.to_q.weight", "attn2.to_k.weight")):
                    parameter *= 2.5
        return cls(unet, text_encoder, codec, EulerDiscreteScheduler.from_config(SCHEDULE))

    def signal_and_noise(self, t: Tensor) -> tuple[Tensor, Tensor]:
        log_signal = self._log_signal.to(t.device, torch.float32)
        t = t.float().clamp(0, TRAIN_TIMESTEPS - 1)  # some schedulers have times in between
        below = t.floor().long()
        above = (below + 1).clamp(max=TRAIN_TIMESTEPS - 1)
        log_signal = torch.lerp(log_signal[below], log_signal[above], t - below)
        return log_signal.exp(), (-torch.expm1(2 * log_signal)).sqrt()

    def correction(
        self, scaled: Tensor, t: Tensor, sequence: Tensor, pooled: Tensor, window: Window = WHOLE
    ) -> Tensor:
        time_ids = _time_ids(*scaled.shape[-2:], scaled.device, scaled.dtype).expand(len(scaled), -1)
        added = {"text_embeds": pooled, "time_ids": time_ids}
        seen = (..., *window)
        inputs = torch.cat([scaled, positions(scaled)], 1)[seen]
        return self.unet(inputs, t, sequence, added_cond_kwargs=added, return_dict=False)[0]

    def predict(self, latents: Tensor, t: Tensor, sequence: Tensor, pooled: Tensor) -> Tensor:
        scaled, correction, deviation = self.noise_estimate(latents, t, sequence, pooled)
        signal, noise = (share.view(-1, 1, 1, 1).to(latents.dtype) for share in self.signal_and_noise(t))
        spread = self.codec.deviation.to(latents.dtype)[:, None, None]
        return (noise * scaled + signal * spread * correction) / deviation

    def output_terms(self, timesteps: Tensor) -> tuple[Tensor, ...]:
        return tuple(terms[..., None, None] for terms in self.channel_terms(timesteps))

    def set_timesteps(self, steps: int, device: torch.device) -> Tensor:
        self.scheduler.set_timesteps(steps, device=device)
        return self.scheduler.timesteps


class EmojiFluxPipeline(EmojiPipeline):
    """Flux's shape: joint and single blocks with rotary positions on 32 x 32 = 1024 image tokens.

    It predicts the velocity of flow matching.
    """

    model_cpu_offload_seq = "text_encoder->transformer->codec"
    size_multiple = PATCH

    def __init__(
        self,
        transformer: FluxTransformer2DModel,
        text_encoder: WordEncoder,
        codec: PatchCodec,
        scheduler: SchedulerMixin,
        default_steps: int = 24,
        default_guidance: float = 2.0,
    ) -> None:
        super().__init__()
        self.register_modules(
            transformer=transformer, text_encoder=text_encoder, codec=codec, scheduler=scheduler
        )
        self.register_to_config(default_steps=default_steps, default_guidance=default_guidance)

    @classmethod
    def untrained(cls, codec: PatchCodec, **changes: Any) -> EmojiFluxPipeline:
        text_encoder = WordEncoder(vocabulary())
        dim = text_encoder.config.dim
        settings: dict[str, Any] = {
            "patch_size": 1,
            "in_channels": CHANNELS + POSITION_CHANNELS,
            "out_channels": CHANNELS,
            "num_layers": 2,
            "num_single_layers": 4,
            "attention_head_dim": 32,
            "num_attention_heads": 5,
            "joint_attention_dim": dim,
            "pooled_projection_dim": dim,
            "guidance_embeds": False,
            "axes_dims_rope": (8, 12, 12),
        }
        transformer = FluxTransformer2DModel(**settings | changes)
        # diffusers leaves the gates random; starting every block as the identity, as DiT does, trains faster.
        for name, module in transformer.named_modules():
            if name.endswith(("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear")) or (
                name == "proj_out"
            ):
                torch.nn.init.zeros_(module.weight)
                torch.nn.init.zeros_(module.bias)
        return cls(transformer, text_encoder, codec, FlowMatchEulerDiscreteScheduler(shift=2.0))

    def signal_and_noise(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return 1 - t, t

    def correction(
        self, scaled: Tensor, t: Tensor, sequence: Tensor, pooled: Tensor, window: Window = WHOLE
    ) -> Tensor:
        seen = (..., *window)
        inputs = torch.cat([scaled, positions(scaled)], 1)[seen]
        rows, columns = (range(n)[w] for n, w in zip(scaled.shape[-2:], window))
        img_ids = _image_ids(rows, columns, scaled.device, scaled.dtype)
        with self.transformer.cache_context("cond"):  # for diffusers' caches, as in its own pipelines
            output = self.transformer(
                inputs.flatten(2).transpose(1, 2),
                encoder_hidden_states=sequence,
                pooled_projections=pooled,
                timestep=t,
                img_ids=img_ids,
                txt_ids=_text_ids(sequence.shape[1], scaled.device, scaled.dtype),
                return_dict=False,
            )[0]
        return output.transpose(1, 2).unflatten(2, (len(rows), len(columns)))

    def predict(self, latents: Tensor, t: Tensor, sequence: Tensor, pooled: Tensor) -> Tensor:
        t = (t / self.scheduler.config.num_train_timesteps).to(latents.dtype)
        return self.velocity(latents, t, sequence, pooled)

    def velocity(
        self, latents: Tensor, t: Tensor, sequence: Tensor, pooled: Tensor, window: Window = WHOLE
    ) -> Tensor:
        """d latents / dt at times `t` [B] in [0, 1], 1 being pure noise."""
        scaled, correction, deviation = self.noise_estimate(latents, t, sequence, pooled, window)
        signal, noise = (share.view(-1, 1, 1, 1) for share in self.signal_and_noise(t))
        spread = self.codec.deviation.to(latents.dtype)[:, None, None]
        return ((noise - signal * spread**2) * scaled + spread * correction) / deviation

    def output_terms(self, timesteps: Tensor) -> tuple[Tensor, ...]:
        return self.channel_terms(timesteps / self.scheduler.config.num_train_timesteps)

    def set_timesteps(self, steps: int, device: torch.device) -> Tensor:
        """Equal steps from 1 down to 0; multistep solvers can't start at 1, and set their own."""
        takes = inspect.signature(self.scheduler.set_timesteps).parameters
        if "sigmas" in takes and not self.scheduler.config.get("use_flow_sigmas"):
            self.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=device)
        else:
            self.scheduler.set_timesteps(steps, device=device)
        return self.scheduler.timesteps


PIPELINES: dict[str, type[EmojiPipeline]] = {"unet": EmojiUNetPipeline, "flux": EmojiFluxPipeline}
