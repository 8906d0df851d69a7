"""One small declaration for each architecture: adding a file with a FAMILY adds it.

Declarations import torch for type checkers only, and within functions: `tomadiff families` lists them all
without waiting for it.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from tomadiff.errors import UnsupportedModelError

from .family import Block, Call, Family, PerTokenArg, Site
from .unsupported import no_denoiser, why

if TYPE_CHECKING:
    from torch import nn

_FILES = sorted(file.name for file in pkgutil.iter_modules(__path__))
_DECLARED = (getattr(importlib.import_module(f".{name}", __name__), "FAMILY", None) for name in _FILES)
FAMILIES: tuple[Family, ...] = tuple(family for family in _DECLARED if family)


def family_of(model: nn.Module) -> Family:
    """The family of a model, by the names of its class and its bases."""
    family = find_family(model)
    if family is not None:
        return family
    reason = why(type(model).__name__)
    if reason:
        raise UnsupportedModelError(f"{type(model).__name__} can't be merged: {reason}")
    supported = "\n  ".join(str(family) for family in FAMILIES)
    raise UnsupportedModelError(
        f"{type(model).__name__} is of no family that tomadiff knows. If it has transformer blocks, say "
        f"where with sites=tomadiff.Sites(...); `tomadiff inspect` helps. Supported are:\n  {supported}"
    )


def find_family(model: nn.Module) -> Family | None:
    """None for denoisers whose tokens can't be merged; anything but a denoiser is refused."""
    names = {cls.__name__ for cls in type(model).__mro__}
    found = next((family for family in FAMILIES if names & set(family.models)), None)
    reason = None if found else no_denoiser(type(model).__name__)
    if reason:
        raise UnsupportedModelError(f"{type(model).__name__} can't be made faster: {reason}")
    return found


__all__ = ["FAMILIES", "Block", "Call", "Family", "PerTokenArg", "Site", "family_of", "find_family"]
