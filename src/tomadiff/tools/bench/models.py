"""Full-size pipelines with random weights, and realistic arguments to call them and their denoisers with.

Speed does not depend on the weights, so nothing has to be downloaded. The denoiser's arguments are real: the
pipeline is run until it calls the denoiser.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch import Tensor, nn

from tomadiff.models import family_of
from tomadiff.runtime.registration import denoiser

from .architectures import ARCHITECTURES

PROMPT = "a red apple"  # the embedded models know these words, too
# sequence lengths of each family's text encoders
TEXT_TOKENS = {"unet": 77, "sd3": 77 + 256, "flux": 512, "sana": 300, "wan": 512}


def build(
    name: str,
    depth: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    decoder: bool = False,
) -> DiffusionPipeline:
    """A pipeline around an architecture with random weights and no text encoders.

    `depth` is the share of its blocks to build. The decoder is needed for whole generations only. On the meta
    device the pipeline has no weights, but its calls can still be captured.
    """
    architecture = ARCHITECTURES[name]
    takes = inspect.signature(architecture.pipeline).parameters
    parts: dict[str, Any] = {part: None for part in takes if takes[part].default is inspect.Parameter.empty}
    model = _made(partial(architecture.model, **architecture.at_depth(depth)), dtype, device)
    parts["unet" if "unet" in parts else "transformer"] = model
    parts["scheduler"] = architecture.scheduler()
    if decoder:
        parts["vae"] = _made(architecture.vae, dtype, device)
    return architecture.pipeline(**parts)


def skeleton_of(name: str, depth: float = 1.0, dtype: torch.dtype = torch.float32) -> ModelMixin:
    """The denoiser of an architecture on the meta device: shapes without weights."""
    return denoiser(build(name, depth, dtype, "meta"))[0]


def skeleton(model: ModelMixin) -> ModelMixin:
    """A copy of a model on the meta device, in the same dtype: shapes without weights."""
    return _made(lambda: type(model).from_config(model.config), model.dtype, "meta")


def depth_note(name: str, depth: float) -> str:
    """How many of the blocks `depth` leaves, in words; empty if all of them."""
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


def _made(make: Callable[[], ModelMixin], dtype: torch.dtype, device: str | torch.device) -> ModelMixin:
    """Make a model directly on its device and in its dtype, since a copy would double the memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = make()
    finally:
        torch.set_default_dtype(before)
    # Position tables are made in float32 regardless. (diffusers' own `to` would warn for no reason.)
    return nn.Module.to(model, dtype).eval()


def arguments(
    pipe: DiffusionPipeline,
    size: tuple[int, int],
    batch: int = 1,
    guidance: float | None = None,
    prompt: str = PROMPT,
) -> dict[str, Any]:
    """Arguments for a pipeline to generate images of this height and width.

    Without text encoders, the prompt is random embeddings. guidance=None means the pipeline's default.
    """
    wanted: dict[str, Any] = {"height": size[0], "width": size[1], "guidance_scale": guidance}
    takes = inspect.signature(pipe.__call__).parameters
    call = {name: value for name, value in wanted.items() if value is not None}
    if missing := [name for name in call if name not in takes]:
        raise ValueError(f"{type(pipe).__name__} takes no {' or '.join(missing)}")
    if any(part is not None for name, part in pipe.components.items() if name.startswith("text_encoder")):
        return {"prompt": [prompt] * batch, **call}
    guided = guidance is None or guidance > 1
    embeddings = _embeddings(denoiser(pipe)[0], batch, guided, pipe._execution_device)
    masks = {name.replace("embeds", "attention_mask"): embeds for name, embeds in embeddings.items()}
    call |= {name: torch.ones_like(embeds[..., 0]) for name, embeds in masks.items() if name in takes}
    if "use_resolution_binning" in takes:  # it would round to the sizes of the training set
        call |= {"use_resolution_binning": False, "negative_prompt": None}
    return {**embeddings, **call}


def _embeddings(model: ModelMixin, batch: int, guided: bool, device: torch.device) -> dict[str, Tensor]:
    """Random embeddings for a prompt, and for a negative prompt if guidance needs one."""
    config, family = model.config, family_of(model).name
    pooled = config.get("pooled_projection_dim")
    if family == "unet" and config.addition_embed_type == "text_time":
        # SDXL concatenates the pooled prompt with embeddings of six numbers for size and crop
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    names = {"unet": "cross_attention_dim", "sana": "caption_channels", "wan": "text_dim"}
    width = config[names.get(family, "joint_attention_dim")]
    shapes: dict[str, tuple[int, ...]] = {"prompt_embeds": (batch, TEXT_TOKENS[family], width)}
    if pooled is not None:
        shapes["pooled_prompt_embeds"] = (batch, pooled)
    if guided and family != "flux":  # Flux takes its guidance as a number
        shapes |= {f"negative_{name}": shape for name, shape in shapes.items()}
    return {name: torch.randn(shape, dtype=model.dtype, device=device) for name, shape in shapes.items()}


class Reached(Exception):
    """Raised when a pipeline calls its denoiser; holds the arguments of that call."""


def first_call(pipe: DiffusionPipeline, arguments: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a pipeline's first call of its denoiser. The pipeline is stopped before that call."""
    model, _ = denoiser(pipe)

    def stop(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        raise Reached(args, kwargs)

    bar = getattr(pipe, "_progress_bar_config", {})
    pipe.set_progress_bar_config(disable=True)  # it would stay on the screen at 0 %
    handle = model.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        pipe(**arguments)
    except Reached as reached:
        return reached.args
    finally:
        handle.remove()
        pipe.set_progress_bar_config(**bar)
    raise RuntimeError(f"{type(pipe).__name__} did not call its {type(model).__name__}")
