"""One small declaration per architecture: a file that defines FAMILY is picked up automatically.

Declarations import torch only for type checking and inside functions, so that `tomadiff families` can list
them without loading torch.
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
    """The family of a model, looked up by the names of its class and base classes."""
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
    """The model's family, or None for a denoiser without one. Raises for models that are not denoisers."""
    names = {cls.__name__ for cls in type(model).__mro__}
    found = next((family for family in FAMILIES if names & set(family.models)), None)
    reason = None if found else no_denoiser(type(model).__name__)
    if reason:
        raise UnsupportedModelError(f"{type(model).__name__} can't be made faster: {reason}")
    return found


__all__ = ["FAMILIES", "Block", "Call", "Family", "PerTokenArg", "Site", "family_of", "find_family"]
