"""What users call: put tomadiff on a pipeline or a model, take it off again, and see what it did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

from .config import Config, ConfigFields, make
from .errors import NotPatchedError
from .models import FAMILIES, Family, custom, find_family
from .models.custom import Sites
from .reporting import Report, make_report
from .runtime import registration
from .runtime.session import Session
from .settings_file import load as load_settings
from .settings_file import made_for_another, warn_of_another

if TYPE_CHECKING:
    from typing_extensions import Unpack

Target = TypeVar("Target")  # a pipeline or a model


def apply(
    target: Target,
    config: Config | str | PathLike[str] | None = None,
    *,
    sites: Sites | None = None,
    **settings: Unpack[ConfigFields],
) -> Target:
    """Make a diffusers pipeline, UNet or transformer faster, by two means that go together.

    `interval` says which steps run the model: in the others, its output is forecast. `ratio` says how many
    tokens the transformer blocks drop in the steps that run, by merging tokens that are alike. With neither,
    the sampler and the number of steps decide, generation by generation, and keys of very long sequences are
    merged in families that bear it, if a measurement says that this gains; `tomadiff.report` tells how.

    Give a `Config`, the name of a settings file, or fields of a `Config` by keyword, as in ratio=0.5.
    `sites` says where to merge in a model of no declared family. Applying again replaces what was there.
    Returns the target.
    """
    path = file = None
    if isinstance(config, (str, PathLike)):
        path, file = config, load_settings(config)
        config = file.config
    config, denoisers = make(config, settings), registration.denoisers(target)
    made_for = made_for_another(file, denoisers[0][0]) if file else None
    sessions = []
    for model, pipeline in denoisers:
        family = find_family(model) if sites is None else custom.family(model, sites)
        sessions.append(Session(model, family, config, pipeline, made_for))
    if path and file:
        warn_of_another(path, file, denoisers[0][0])
    remove(target)
    for session in sessions:
        registration.attach(session)
    return target


def remove(target: Target) -> Target:
    """Take tomadiff off again, exactly; nothing happens where it is not on. Returns the target."""
    for session in _sessions(target):
        session.forget()  # hooks and modules hold each other: tensors would stay until they are collected
        registration.detach(session)
    return target


def forget(target: Target) -> Target:
    """Let go of all plans and forecasts at once, where a generation was left before its end.

    After the last step of a generation, none are held anyway. Returns the target.
    """
    for session in _sessions(target):
        session.forget()
    return target


@contextlib.contextmanager
def merged(
    target: Target,
    config: Config | str | PathLike[str] | None = None,
    *,
    sites: Sites | None = None,
    **settings: Unpack[ConfigFields],
) -> Iterator[Target]:
    """`apply` for the length of a `with` block, then again what was there before."""
    models, before = [model for model, _ in registration.denoisers(target)], _sessions(target)
    apply(target, config, sites=sites, **settings)
    try:
        yield target
    finally:
        for each in (target, *models):  # a pipeline may have got another model meanwhile
            remove(each)
        for session in before:
            registration.attach(session)


def report(target: Any) -> Report:
    """What was done since `apply`: steps run and forecast, tokens merged, and why; prints as a table."""
    sessions = _sessions(target)
    if not sessions:
        model = registration.denoiser(target)[0]
        raise NotPatchedError(
            f"nothing to report: {type(model).__name__} is as it was; call tomadiff.apply first"
        )
    return make_report(sessions, registration.second(target))


def families() -> tuple[Family, ...]:
    """The supported architectures."""
    return FAMILIES


def _sessions(target: Any) -> list[Session]:
    """Those that are on the models of a target."""
    models = [model for model, _ in registration.denoisers(target)]
    return [session for session in map(registration.session_of, models) if session is not None]
