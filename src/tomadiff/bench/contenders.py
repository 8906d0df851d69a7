"""The ways to run a model that a benchmark compares."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from torch import nn

from .. import hook
from ..config import DEFAULTS, PRESETS, Config, make
from ..errors import ConfigError
from ..families import Family, family_of

DENSE, TOMESD, OURS = "dense", "tomesd", "tomadiff"
PLAIN = (DENSE, TOMESD)  # without a patch of ours
# our default, then the paper's variants and the other methods as they were published
NAMES = (
    DENSE,
    "ideal",
    OURS,
    *PRESETS,
    *(name for name in DEFAULTS if name not in ("toma", "ideal")),
    TOMESD,
)

TOMESD_SETTINGS = {"max_downsample": 4}  # its own default, 1, finds nothing to merge in SDXL


@dataclass(frozen=True)
class Contender:
    """One way to run a model, at one ratio. `on` and `off` switch it."""

    method: str
    ratio: float  # 0 for dense
    on: Callable[[], Any] = lambda: None
    off: Callable[[], Any] = lambda: None
    patch: hook.Patch | None = None  # of what is our own

    @property
    def label(self) -> str:
        return label(self.method, self.ratio)

    @property
    def config(self) -> Config | None:
        return self.patch.config if self.patch else None

    @property
    def settings(self) -> dict[str, Any]:
        if self.method == TOMESD:
            return {"ratio": self.ratio, **TOMESD_SETTINGS, "version": version("tomesd")}
        return self.config.to_dict() if self.config else {}

    @property
    def plans_in_every_call(self) -> bool:
        return self.config is None or self.config.refresh_weights == 1


def label(method: str, ratio: float) -> str:
    return f"{method} at {ratio:g}" if ratio else method


def configuration(method: str, ratio: float, family: Family) -> Config:
    """By name, with single settings behind it where wanted: `tomadiff:where=span,shift=True`."""
    name, _, fields = method.partition(":")
    settings: dict[str, Any] = {"ratio": ratio, **dict(map(_setting, filter(None, fields.split(","))))}
    if name not in NAMES or name in PLAIN:
        raise ConfigError(
            f"unknown method {method!r}; there are {', '.join(NAMES)}, and {OURS}:setting=value,..."
        )
    if name in DEFAULTS and name not in PRESETS:
        settings["method"] = name
    return make(None, name if name in PRESETS else None, settings, family.paper_reuse)


def pairs(
    methods: Sequence[str], ratios: Sequence[float], family: Family
) -> tuple[list[tuple[str, float]], list[str]]:
    """What to measure, (method, ratio), each method at all ratios it can do; and what was left out, why."""
    measured, left_out = [], []
    for method in methods:
        if method == DENSE:
            measured.append((method, 0.0))
            continue
        if method == TOMESD and family.name != "unet":
            raise ConfigError(f"tomesd knows UNets only, not {family.covers}; leave it out, or take tome")
        if method == TOMESD and find_spec("tomesd") is None:
            raise ImportError("tomesd is not there to compare with: pip install 'tomadiff[bench]'")
        possible = []
        for ratio in ratios:
            try:
                if method == TOMESD:
                    configuration("tome", ratio, family)  # the real one would do less in silence
                else:
                    configuration(method, ratio, family)
                possible.append((method, ratio))
            except ConfigError as error:
                reason = error
                left_out.append(f"{method} at {ratio:g} is left out: {error}")
        if not possible:
            raise reason
        measured += possible
    return sorted(measured, key=lambda pair: pair[1]), left_out


def contender(model: nn.Module, pipeline: Any, method: str, ratio: float) -> Contender:
    if method == DENSE:
        return Contender(method, 0.0)
    if method == TOMESD:
        import tomesd

        return Contender(
            method,
            ratio,
            lambda: tomesd.apply_patch(model, ratio=ratio, **TOMESD_SETTINGS),
            lambda: tomesd.remove_patch(model),
        )
    family = family_of(model)
    patch = hook.Patch(model, family, configuration(method, ratio, family), pipeline)
    return Contender(method, ratio, lambda: hook.attach(patch), lambda: hook.detach(patch), patch)


def _setting(pair: str) -> tuple[str, Any]:
    name, _, value = pair.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
