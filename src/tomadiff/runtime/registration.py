"""Putting merging on the models of a pipeline, and taking it off again."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from tomadiff.errors import UnsupportedModelError
from tomadiff.models import FAMILIES, Site

from .hook import parameter_names
from .session import Patch

PATCH = "_tomadiff"  # the model's attribute that holds its Patch


def denoiser(target: Any) -> tuple[nn.Module, Any]:
    """The model to patch, and the pipeline it belongs to if that was given."""
    if isinstance(target, nn.Module):
        return _uncompiled(target), None
    if hasattr(target, "prior_pipe") and hasattr(target, "decoder_pipe"):
        raise UnsupportedModelError(
            f"{type(target).__name__} draws with two pipelines, each with a model and steps of its own: "
            "give tomadiff its prior_pipe and its decoder_pipe, one by one"
        )
    # Wan 2.2 may come without its model for the first steps
    for name in ("unet", "transformer", "prior", "decoder", "transformer_2"):
        model = getattr(target, name, None)
        if isinstance(model, nn.Module):
            return _uncompiled(model), target
    supported = "\n  ".join(map(str, FAMILIES))
    raise UnsupportedModelError(
        f"{type(target).__name__} is no model, and no pipeline with one. Supported are:\n  {supported}"
    )


def second(target: Any) -> str | None:
    """The name of a second model: Wan 2.2 has one for the last steps, Ideogram 4 one for guidance."""
    if isinstance(target, nn.Module):
        return None
    names = ("transformer_2", "unconditional_transformer")
    return next((name for name in names if isinstance(getattr(target, name, None), nn.Module)), None)


def denoisers(target: Any) -> list[tuple[nn.Module, Any]]:
    """All models to patch, each once."""
    first, name = denoiser(target), second(target)
    other = first[0] if name is None else _uncompiled(getattr(target, name))
    return [first] if other is first[0] else [first, (other, target)]


def _uncompiled(model: nn.Module) -> nn.Module:
    """What torch.compile returns holds the model."""
    return getattr(model, "_orig_mod", model)


def patch_of(model: nn.Module) -> Patch | None:
    """What is on a model."""
    return getattr(model, PATCH, None)


def attach(patch: Patch) -> None:
    """Put the hooks on."""
    for hook in patch.sites:
        hook.register()
    # the model itself is watched by torch's hooks: offloading replaces its forward after every generation
    patch.handles = [
        patch.model.register_forward_pre_hook(patch.before_model, with_kwargs=True),
        patch.model.register_forward_hook(patch.after_model, always_call=True),
    ]
    if patch.state.from_input:
        # whole blocks see their input themselves
        inside = {hook.place.block: hook for hook in patch.sites if hook.site.path}
        wholes = {part.name: part.whole or Site("block") for part in patch.family.blocks}
        for block, hook in inside.items():
            keep = functools.partial(hook.before_block, wholes[type(block).__name__], parameter_names(block))
            patch.handles.append(block.register_forward_pre_hook(keep, with_kwargs=True))
    setattr(patch.model, PATCH, patch)
    # hooks hold on to the very modules they are on, so a copy has to be made without them
    patch.model.__deepcopy__ = functools.partial(_copy, patch)


def detach(patch: Patch) -> None:
    """Take the hooks off and leave nothing behind."""
    for handle in patch.handles:
        handle.remove()
    for hook in patch.sites:
        hook.unregister()
    delattr(patch.model, PATCH)
    del patch.model.__deepcopy__


@contextlib.contextmanager
def attached(patch: Patch) -> Iterator[None]:
    """With the hooks on for the length of a `with` block."""
    attach(patch)
    try:
        yield
    finally:
        detach(patch)


def _copy(patch: Patch, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy` of a patched model: the same settings on a model, and in a pipeline, of its own."""
    detach(patch)
    try:
        twin = copy.deepcopy(patch.model, memo)
    finally:
        attach(patch)
    pipeline = patch.state.clock.pipeline and patch.state.clock.pipeline()
    copied = Patch(twin, patch.family, patch.config, memo.get(id(pipeline)))
    copied.made_for = patch.made_for
    attach(copied)
    return twin
