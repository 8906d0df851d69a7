"""Full-size architectures with random weights, and single calls of any pipeline's denoiser.

Speed does not depend on the weights, so there is nothing to download: the shapes are the published ones. And
what a denoiser is called with is not made up: a pipeline is run until it calls it, and that call is kept.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
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
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..attachment import denoiser
from ..families import family_of
from ..hook import parameter_names

PROMPT = "a red apple"  # which the embedded models know, too
STEPS = 1000  # entries of a table of timesteps
# of each family's text encoders, CLIP, T5 and Gemma
TEXT_TOKENS = {"unet": 77, "sd3": 77 + 256, "flux": 512, "sana": 300, "wan": 512}


@dataclass(frozen=True)
class Architecture:
    """A published model, without its weights."""

    title: str
    size: tuple[int, int]  # of its pictures, or of frames: height and width in pixels
    steps: int  # of a generation in the paper
    pipeline: Callable[..., DiffusionPipeline]
    model: Callable[..., ModelMixin]
    vae: Callable[..., ModelMixin]
    scheduler: Callable[[], SchedulerMixin]
    config: dict[str, Any]  # of the model


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
# Not PNDM and Euler, as published with 1.5 and SDXL: PNDM calls the model twice in one step, and Euler reads
# values, which a pipeline on the meta device doesn't have.
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
    "attention_head_dim": 8,  # in UNets, the number of heads
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


def build(
    name: str,
    depth: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    decoder: bool = False,
) -> DiffusionPipeline:
    """A pipeline around an architecture with random weights and no text encoders.

    `depth` is the share of its blocks to build. The decoder takes part in whole generations only. On the meta
    device, the pipeline has no weights at all; its calls can be captured all the same.
    """
    architecture = ARCHITECTURES[name]
    takes = inspect.signature(architecture.pipeline).parameters
    parts: dict[str, Any] = {part: None for part in takes if takes[part].default is inspect.Parameter.empty}
    config = _at_depth(architecture, depth)
    model = _made(partial(architecture.model, **config), dtype, device)
    parts["unet" if "unet" in parts else "transformer"] = model
    parts["scheduler"] = architecture.scheduler()
    if decoder:
        parts["vae"] = _made(architecture.vae, dtype, device)
    return architecture.pipeline(**parts)


def skeleton_of(name: str, depth: float = 1.0, dtype: torch.dtype = torch.float32) -> ModelMixin:
    """The denoiser of an architecture on the meta device: shapes without weights."""
    return denoiser(build(name, depth, dtype, "meta"))[0]


def skeleton(model: ModelMixin) -> ModelMixin:
    """The same for a model that is there, in its precision."""
    return _made(lambda: type(model).from_config(model.config), model.dtype, "meta")


def depth_note(name: str, depth: float) -> str:
    """What `depth` left of the blocks, in words; nothing where that is all of them."""
    if depth == 1:
        return ""
    shallow, full = skeleton_of(name, depth), skeleton_of(name)
    blocks = [block for block in family_of(full).blocks if _count(full, block.name)]
    kinds = [block.whole.kind if block.whole else "block" for block in blocks]
    counts = [
        f"{_count(shallow, block.name)} of {_count(full, block.name)} {kind}"
        for block, kind in zip(blocks, kinds)
    ]
    return f"{' and '.join(counts)} blocks".replace("block blocks", "transformer blocks")  # in a UNet


def _count(model: nn.Module, class_name: str) -> int:
    return sum(type(module).__name__ == class_name for module in model.modules())


def _at_depth(architecture: Architecture, depth: float) -> dict[str, Any]:
    """The configuration with that share of the blocks, at least one of each kind."""
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
    full = architecture.config
    config = {name: scaled[name](value) if name in scaled else value for name, value in full.items()}
    if depth < 1 and config == full:
        raise ValueError(f"depth={depth} leaves out no block of {architecture.title}: build it at depth 1")
    return config


def _made(make: Callable[[], ModelMixin], dtype: torch.dtype, device: str | torch.device) -> ModelMixin:
    """A model made where and as it is to be: made elsewhere first, a large one would be there twice."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = make()
    finally:
        torch.set_default_dtype(before)
    # Tables of positions are made in float32 all the same. (diffusers' own `to` would warn for no reason.)
    return nn.Module.to(model, dtype).eval()


def arguments(
    pipe: DiffusionPipeline,
    size: tuple[int, int],
    batch: int = 1,
    guidance: float | None = None,
    prompt: str = PROMPT,
) -> dict[str, Any]:
    """What to call a pipeline with for pictures of that height and width.

    Without text encoders, the prompt is random embeddings. Guidance None is the pipeline's own default.
    """
    wanted = {"height": size[0], "width": size[1], "guidance_scale": guidance}
    takes = inspect.signature(pipe.__call__).parameters
    call = {name: value for name, value in wanted.items() if value is not None}
    if missing := [name for name in call if name not in takes]:
        raise ValueError(f"{type(pipe).__name__} takes no {' or '.join(missing)}")
    if any(part is not None for name, part in pipe.components.items() if name.startswith("text_encoder")):
        return {"prompt": [prompt] * batch, **call}
    embeddings = _embeddings(denoiser(pipe)[0], batch, guided=guidance is None or guidance > 1)
    masks = {name.replace("embeds", "attention_mask"): embeds for name, embeds in embeddings.items()}
    call |= {name: torch.ones_like(embeds[..., 0]) for name, embeds in masks.items() if name in takes}
    if "use_resolution_binning" in takes:  # to sizes that weights were trained on
        call |= {"use_resolution_binning": False, "negative_prompt": None}
    return {**embeddings, **call}


def _embeddings(model: ModelMixin, batch: int, guided: bool) -> dict[str, Tensor]:
    """Random embeddings of a prompt, and of a negative one where guidance asks for it."""
    config, family = model.config, family_of(model).name
    pooled = config.get("pooled_projection_dim")
    if family == "unet" and config.addition_embed_type == "text_time":
        # SDXL puts the pooled prompt beside six numbers about size and crop
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    names = {"unet": "cross_attention_dim", "sana": "caption_channels", "wan": "text_dim"}
    width = config[names.get(family, "joint_attention_dim")]
    shapes = {"prompt_embeds": (batch, TEXT_TOKENS[family], width)}
    if pooled is not None:
        shapes["pooled_prompt_embeds"] = (batch, pooled)
    if guided and family != "flux":  # Flux is told its guidance as a number
        shapes |= {f"negative_{name}": shape for name, shape in shapes.items()}
    return {
        name: torch.randn(shape, dtype=model.dtype, device=model.device) for name, shape in shapes.items()
    }


@dataclass(frozen=True)
class Step:
    """One call of a denoiser, to be made at any step: `step(n)`, n from 0 to 999, runs it once."""

    model: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    place: int | str  # of the timestep among the arguments
    table: Tensor  # timesteps, downward in time: as from a scheduler, the view of an entry tells the step

    @torch.no_grad()
    def __call__(self, n: int) -> Any:
        args, kwargs = [*self.args], {**self.kwargs}
        arguments: Any = args if isinstance(self.place, int) else kwargs
        arguments[self.place] = self.table[n].expand_as(arguments[self.place])
        return self.model(*args, **kwargs)

    def argument(self, name: str) -> Any:
        """An argument of the call by its name."""
        return (dict(zip(parameter_names(self.model), self.args)) | self.kwargs).get(name)

    def on(self, model: nn.Module) -> Step:
        """The same call of another model, on that model's device."""
        device = next(model.parameters()).device
        args, kwargs, table = tree_map_only(
            Tensor, lambda tensor: tensor.to(device), (self.args, self.kwargs, self.table)
        )
        return dataclasses.replace(self, model=model, args=args, kwargs=kwargs, table=table)


class Reached(Exception):
    """A pipeline has come to its denoiser; holds the arguments of that call."""


def capture(pipe: DiffusionPipeline, arguments: dict[str, Any]) -> Step:
    """The first call that a pipeline makes of its denoiser, as a step."""
    return _step(denoiser(pipe)[0], *first_call(pipe, arguments))


def first_call(pipe: DiffusionPipeline, arguments: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """What a pipeline first calls its denoiser with. It is stopped there: no weights run."""
    model, _ = denoiser(pipe)

    def stop(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        raise Reached(args, kwargs)

    bar = getattr(pipe, "_progress_bar_config", {})
    pipe.set_progress_bar_config(disable=True)  # it would stay at 0 % on the screen
    handle = model.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        pipe(**arguments)
    except Reached as reached:
        return reached.args
    finally:
        handle.remove()
        pipe.set_progress_bar_config(**bar)
    raise RuntimeError(f"{type(pipe).__name__} did not call its {type(model).__name__}")


def _step(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Step:
    if "sample" in kwargs:  # tomesd looks for a UNet's sample among the positional arguments
        kwargs = dict(kwargs)
        args = (kwargs.pop("sample"), *args)
    time = family_of(model).time
    if time is None:
        raise ValueError(f"{type(model).__name__} isn't told the time, and can't be called at a step")
    place = time if time in kwargs else parameter_names(model).index(time)
    timestep: Tensor = kwargs[place] if isinstance(place, str) else args[place]
    first = timestep.flatten()[0]
    # not read but computed with: reading would wait for the device, and a meta tensor has no value
    table = (first * torch.linspace(1, 0, STEPS, device=first.device)).to(first.dtype)
    return Step(model, args, kwargs, place, table)
