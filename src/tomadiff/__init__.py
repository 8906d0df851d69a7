"""tomadiff: faster diffusion models in one call, without training.

>>> import tomadiff
>>> tomadiff.apply(pipe)             # the best that is known for this pipeline, sampler and number of steps
>>> tomadiff.apply(pipe, ratio=0.5)  # token merging in every step
>>> print(tomadiff.report(pipe))
>>> tomadiff.remove(pipe)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors as errors

if TYPE_CHECKING:
    from .api import apply, families, forget, merged, remove, report
    from .config import Config
    from .models.custom import Sites

__version__ = "0.1.0"
__all__ = ["Config", "Sites", "apply", "families", "forget", "merged", "remove", "report"]

# Importing torch and diffusers takes seconds, so they are imported when one of these is first used. The
# command `tomadiff` prints its help and complains about its arguments without them.
_MODULES = {
    "Config": ".config",
    "Sites": ".models.custom",
    "apply": ".api",
    "families": ".api",
    "forget": ".api",
    "merged": ".api",
    "remove": ".api",
    "report": ".api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
