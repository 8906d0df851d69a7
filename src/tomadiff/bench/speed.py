"""How much faster, against what is possible: methods take turns in one process, call by call.

Timings on a shared machine swing by a factor of two, so only calls of the same round are compared: the figures are
medians of ratios within rounds.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import hook
from ..config import Config, make
from ..families import family_of
from . import models


@dataclass
class Contender:
    """One way to run the model; `on` and `off` switch it."""

    name: str
    on: Callable[[], Any] = lambda: None
    off: Callable[[], Any] = lambda: None
    patch: hook.Patch | None = None
    seconds: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)  # bytes


def contenders(model: nn.Module, ratio: float, names: list[str]) -> list[Contender]:
    """`dense`, `ideal`, `tomesd`, `toma` (the defaults), `toma:where=span,shift=True`, or a preset's name."""
    return [_contender(model, ratio, name) for name in names]


def _contender(model: nn.Module, ratio: float, name: str) -> Contender:
    if name == "dense":
        return Contender(name)
    if name == "tomesd":
        import tomesd

        # its default, max_downsample=1, finds nothing to merge in SDXL
        return Contender(
            name,
            lambda: tomesd.apply_patch(model, ratio=ratio, max_downsample=4),
            lambda: tomesd.remove_patch(model),
        )
    patch = hook.Patch(model, family_of(model), _config(name, ratio, family_of(model).paper_reuse))
    return Contender(name, lambda: hook.attach(patch), lambda: hook.detach(patch), patch)


def _config(name: str, ratio: float, paper_reuse: tuple[int, int]) -> Config:
    if name == "ideal":
        return Config(ratio=ratio, method="ideal")
    preset, _, rest = name.partition(":")
    settings = dict(pair.split("=", 1) for pair in rest.split(",") if pair)
    values = {key: _literal(value) for key, value in settings.items()}
    return make(None, None if preset == "toma" else preset.removeprefix("paper-"), values | {"ratio": ratio}, paper_reuse)


def _literal(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"True": True, "False": False}.get(text, text)
