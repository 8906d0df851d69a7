"""tomadiff: diffusion models on fewer tokens, in one call, without training.

>>> import tomadiff
>>> tomadiff.apply(pipe, ratio=0.5)
>>> print(tomadiff.report(pipe))
>>> tomadiff.remove(pipe)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from os import PathLike
from typing import Any, TypeVar

from .config import Config, make
from .errors import NotPatchedError
from .models import FAMILIES, Family, custom, family_of
from .models.custom import Sites
from .report import Report, make_report
from .runtime import registration
from .runtime.session import Patch
from .settings_file import load as load_settings
from .settings_file import warn_of_another

__version__ = "0.1.0"
__all__ = ["Config", "Sites", "apply", "families", "merged", "remove", "report"]

Target = TypeVar("Target")  # a pipeline or a model


def apply(
    target: Target,
    config: Config | str | PathLike[str] | None = None,
    *,
    preset: str | None = None,
    sites: Sites | None = None,
    **settings: Any,
) -> Target:
    """Let the transformer blocks of a diffusers pipeline, UNet or transformer run on fewer tokens.

    Give a `Config`, the name of a settings file, or fields of a `Config` by keyword, on top of a preset where
    one is named ("toma", "toma_once", "toma_tile", "toma_stripe"). "auto" measures where merging gains on
    this device, and leaves the rest dense. `sites` says where to merge in a model of no declared family.
    Applying again replaces what was there. Returns the target.
    """
    path = file = None
    if config == "auto":
        config, settings = None, {"auto": True, **settings}
    elif isinstance(config, (str, PathLike)):
        path, file = config, load_settings(config)
        # as if by keyword, so that what it leaves out is as the model allows; beside others, it is refused
        config, settings = (file.config, settings) if settings or preset else (None, file.given)
    patches = []
    for model, pipeline in registration.denoisers(target):
        family = family_of(model) if sites is None else custom.family(model, sites)
        chosen = make(config, preset, settings, family.paper_reuse, family.offers)
        patches.append(Patch(model, family, chosen, pipeline))
    made_for = warn_of_another(path, file, patches[0].model) if file else None
    remove(target)
    for patch in patches:
        patch.made_for = made_for
        registration.attach(patch)
    return target


def remove(target: Target) -> Target:
    """Take merging off again, exactly; nothing happens where there is none. Returns the target."""
    for patch in _patches(target):
        registration.detach(patch)
        patch.forget()  # hooks and modules hold each other: its tensors would stay until these are collected
    return target


@contextlib.contextmanager
def merged(
    target: Target,
    config: Config | str | PathLike[str] | None = None,
    *,
    preset: str | None = None,
    sites: Sites | None = None,
    **settings: Any,
) -> Iterator[Target]:
    """Merging for the length of a `with` block, then again what was there before."""
    models, before = [model for model, _ in registration.denoisers(target)], _patches(target)
    apply(target, config, preset=preset, sites=sites, **settings)
    try:
        yield target
    finally:
        for each in (target, *models):  # a pipeline may have got another model meanwhile
            remove(each)
        for patch in before:
            registration.attach(patch)


def report(target: Any) -> Report:
    """What merging did since it was applied; prints as a table."""
    patches = _patches(target)
    if not patches:
        model = registration.denoiser(target)[0]
        raise NotPatchedError(
            f"nothing to report: {type(model).__name__} has no merging; call tomadiff.apply first"
        )
    return make_report(patches, registration.second(target))


def families() -> tuple[Family, ...]:
    """The supported architectures."""
    return FAMILIES


def _patches(target: Any) -> list[Patch]:
    """What is on the models of a target."""
    models = [model for model, _ in registration.denoisers(target)]
    return [patch for patch in map(registration.patch_of, models) if patch is not None]
