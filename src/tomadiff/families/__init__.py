"""One small declaration for each architecture."""

from __future__ import annotations

from torch import nn

from ..errors import UnsupportedModelError
from . import flux, sd3, unet
from .family import Block, Call, Family, Site

FAMILIES: tuple[Family, ...] = (unet.FAMILY, sd3.FAMILY, flux.FAMILY)


def family_of(model: nn.Module) -> Family:
    """The family of a model, by the names of its class and its bases."""
    names = {cls.__name__ for cls in type(model).__mro__}
    for family in FAMILIES:
        if names & set(family.models):
            return family
    supported = "\n  ".join(str(family) for family in FAMILIES)
    raise UnsupportedModelError(
        f"{type(model).__name__} has no place where tomadiff can merge tokens. Supported are:\n  {supported}"
    )


__all__ = ["FAMILIES", "Block", "Call", "Family", "Site", "family_of"]
