"""Models of diffusers by the names of their classes, with random weights, and arguments to call them with.

Nobody tells what a class takes. So arguments are made up from their names and from the configuration, in some
ways that are usual, until the model runs.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import diffusers
import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from tomadiff.errors import UnsupportedModelError

SIDE, FRAMES, TEXT = 32, 5, 16  # side and frames of a latent, and number of text tokens
CHANNELS = ("in_channels", "in_visual_dim", "in_channel", "num_channels_latents")
WIDTHS = (
    *("text_embed_dim", "text_dim", "caption_channels", "joint_attention_dim", "cross_attention_dim"),
    *("in_text_dim", "cap_feat_dim", "context_in_dim", "text_hidden_size", "encoder_hid_dim", "caption_dim"),
    *("text_embed_2_dim", "text_states_dim", "cross_attention_dim_t5"),
)
FEWEST = ("timestep", "encoder_hidden_states", "return_dict")
DEPTH = re.compile(r"(num|n)_.*(layers|blocks)|.*_layers|depth")


def is_class(name: str) -> bool:
    found = getattr(diffusers, name, None) if name.isidentifier() else None
    return isinstance(found, type) and issubclass(found, ModelMixin)


def build(name: str, depth: int = 2, dtype: torch.dtype = torch.float32, device: str = "cpu") -> ModelMixin:
    """A model of this class, as wide as its default, with at most `depth` blocks in a list, or all for 0."""
    cls = getattr(diffusers, name)
    settings = {
        parameter.name: min(parameter.default, depth)
        for parameter in inspect.signature(cls.__init__).parameters.values()
        if isinstance(parameter.default, int) and DEPTH.fullmatch(parameter.name)
    }
    try:
        with torch.device(device):
            # diffusers' own `to` would warn for no reason
            return nn.Module.to(cls(**settings if depth else {}), dtype).eval()
    except (TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name} can't be made from its defaults ({error}): give the folder of a model, or its hub id"
        ) from error


def arguments(model: ModelMixin) -> dict[str, Any]:
    """Arguments with which the model runs."""
    unknown = _required(model) - set(_known(model, *next(_variants(model))))
    ran, furthest, failed = 0, -1, f"it needs {', '.join(sorted(unknown))}"

    def count(*_: Any) -> None:
        nonlocal ran
        ran += 1

    handles = [module.register_forward_pre_hook(count) for module in model.modules()]
    try:
        for call in _ways(model):
            ran = 0
            try:
                with torch.no_grad():
                    model(**call)
                return call
            except Exception as error:  # models raise all kinds of errors if their arguments don't fit
                if ran > furthest:
                    furthest, failed = ran, str(error)
    finally:
        for handle in handles:
            handle.remove()
    raise UnsupportedModelError(
        f"no arguments that were made up suit {type(model).__name__} ({failed}): call "
        "tomadiff.tools.inspect.inspect_call(model, ...) with those that you have"
    )


def _required(model: ModelMixin) -> set[str]:
    parameters = inspect.signature(type(model).forward).parameters
    return {name for name, parameter in parameters.items() if parameter.default is parameter.empty} - {"self"}


def _ways(model: ModelMixin) -> Iterator[dict[str, Any]]:
    """Calls to try: with all arguments that are known, and with the fewest."""
    required = _required(model)
    for variant in _variants(model):
        call = _known(model, *variant)
        if required <= set(call):
            yield call
            yield {name: value for name, value in call.items() if name in {*required, *FEWEST}}


def _variants(model: ModelMixin) -> Iterator[tuple[dict[str, Any], int, torch.dtype]]:
    """Latents, with what belongs to them; the width of text; and whether timesteps are whole numbers."""
    config = model.config
    channels = next((config[name] for name in CHANNELS if config.get(name)), 4)
    frames = config.get("video_length") or config.get("num_frames") or FRAMES
    widths = dict.fromkeys(config[name] for name in WIDTHS if isinstance(config.get(name), int))
    latents = [
        {"": (channels, SIDE, SIDE)},
        {"": (channels, frames, SIDE, SIDE)},
        {"": (frames, channels, SIDE, SIDE)},
        {"": (SIDE * SIDE, channels), "num_frames": 1, "height": SIDE, "width": SIDE},
        {"": (frames, SIDE, SIDE, channels)},
    ]
    yield from itertools.product(latents, widths or [1], (model.dtype, torch.long))


def _known(model: ModelMixin, latent: dict[str, Any], width: int, times: torch.dtype) -> dict[str, Any]:
    """Values for those of the model's arguments whose names are known."""
    config = model.config

    def noise(*shape: int) -> Tensor:
        return torch.randn(1, *shape, dtype=model.dtype, device=model.device)

    def full(*shape: int, value: float = 1.0, dtype: torch.dtype = model.dtype) -> Tensor:
        return torch.full((1, *shape), value, dtype=dtype, device=model.device)

    latents = noise(*latent[""])
    call = {
        "hidden_states": latents,
        "sample": latents,
        "timestep": full(value=500, dtype=times),
        "encoder_hidden_states": noise(TEXT, width),
        "encoder_attention_mask": full(TEXT, dtype=torch.bool),
        "pooled_projections": noise(config.get("pooled_projection_dim") or 1),
        "guidance": full() if config.get("guidance_embeds") else None,
        "class_labels": full(value=0, dtype=torch.long),
        "original_size": full(2, value=8 * SIDE),
        "target_size": full(2, value=8 * SIDE),
        "crop_coords": full(2, value=0),
        "added_time_ids": full(3),
        "return_dict": False,
        **{name: value for name, value in latent.items() if name},
    }
    if latents.ndim == 3:
        grid = (torch.arange(float(side), device=model.device) for side in (1, SIDE, SIDE))
        call |= {"img_ids": torch.cartesian_prod(*grid), "txt_ids": torch.zeros(TEXT, 3, device=model.device)}
    parameters = inspect.signature(type(model).forward).parameters
    return {name: value for name, value in call.items() if name in parameters and value is not None}
