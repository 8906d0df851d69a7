"""Attach tomadiff to the models of a pipeline, and detach it again."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from tomadiff.errors import UnsupportedModelError
from tomadiff.models import FAMILIES

from .conditions import unwatch_controlnet, watch_controlnet
from .session import SESSION, Session
from .undo import drop_pre_hook


def denoiser(target: Any) -> tuple[nn.Module, Any]:
    """The model to work on, and its pipeline if the target is one."""
    if isinstance(target, nn.Module):
        return _uncompiled(target), None
    if hasattr(target, "prior_pipe") and hasattr(target, "decoder_pipe"):
        raise UnsupportedModelError(
            f"{type(target).__name__} draws with two pipelines, each with a model and steps of its own: "
            "give tomadiff its prior_pipe and its decoder_pipe, one by one"
        )
    # transformer_2 alone: Wan 2.2 may be loaded without its model for the first steps
    for name in ("unet", "transformer", "prior", "decoder", "transformer_2"):
        model = getattr(target, name, None)
        if isinstance(model, nn.Module):
            return _uncompiled(model), target
    supported = "\n  ".join(map(str, FAMILIES))
    raise UnsupportedModelError(
        f"{type(target).__name__} is no model, and no pipeline with one. Supported are:\n  {supported}"
    )


def second(target: Any) -> str | None:
    """The name of a pipeline's second model: Wan 2.2 has one for the last steps, Ideogram 4 for guidance."""
    if isinstance(target, nn.Module):
        return None
    names = ("transformer_2", "unconditional_transformer")
    return next((name for name in names if isinstance(getattr(target, name, None), nn.Module)), None)


def denoisers(target: Any) -> list[tuple[nn.Module, Any]]:
    """All models to work on, each once."""
    first, name = denoiser(target), second(target)
    other = first[0] if name is None else _uncompiled(getattr(target, name))
    return [first] if other is first[0] else [first, (other, target)]


def _uncompiled(model: nn.Module) -> nn.Module:
    """The model inside what torch.compile returned."""
    return getattr(model, "_orig_mod", model)


def session_of(model: nn.Module) -> Session | None:
    """The session that is attached to a model, if any."""
    return getattr(model, SESSION, None)


def attach(session: Session) -> None:
    """Attach a session to its model, completely or not at all."""
    model = session.model
    setattr(model, SESSION, session)  # first, so that `remove` finds it after an interrupt
    try:
        _add_hooks(session)
        # The session goes around everything on the model: hooks, a cache, offloading, `model.compile()`.
        # PyTorch calls this attribute instead of the module; offloading replaces `forward`, but not this.
        session.compiled = model._compiled_call_impl
        model._compiled_call_impl = session
    except BaseException:
        detach(session)
        raise


def detach(session: Session) -> None:
    """Detach a session from its model, even if it is only partly attached, and leave nothing behind."""
    model = session.model
    if model._compiled_call_impl is session:
        if session.compiled is None:
            del model._compiled_call_impl
        else:
            model._compiled_call_impl = session.compiled
    _remove_hooks(session)
    vars(model).pop(SESSION, None)  # last, so that `remove` finds it after an interrupt


def _add_hooks(session: Session) -> None:
    for hook in session.hooks:
        hook.register(session)
    session.watch_block_inputs()
    watch_controlnet(session.pipeline)
    # hooks hold references to their modules, so a copy has to be made without them
    session.model.__deepcopy__ = functools.partial(_copy, session)
    session.model.compile = session.compile


def _remove_hooks(session: Session) -> None:
    unwatch_controlnet(session.pipeline)
    while session.watched:
        drop_pre_hook(*session.watched[-1])
        session.watched.pop()
    for hook in session.hooks:
        hook.unregister()
    for name in ("compile", "__deepcopy__"):
        vars(session.model).pop(name, None)


@contextlib.contextmanager
def attached(session: Session) -> Iterator[None]:
    """Attach a session for the length of a `with` block."""
    attach(session)
    try:
        yield
    finally:
        detach(session)


def _copy(session: Session, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy` of the model: the copy gets its own session with the same settings."""
    with session.guard.alone():
        _remove_hooks(session)
        try:
            # The session itself stays attached, so that a thread that calls the model now waits for us
            # instead of running it without tomadiff. It is not copied.
            memo[id(session)] = None
            twin = copy.deepcopy(session.model, memo)
            vars(twin).pop(SESSION)
        finally:
            try:
                _add_hooks(session)
            except BaseException:
                detach(session)
                raise
    pipeline = memo.get(id(session.pipeline))
    copied = Session(twin, session.family, session.asked, pipeline, session.made_for)
    attach(copied)
    return twin
