"""The real ToMeSD package, to check our own ToMe against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter
from typing import Any

from tomadiff.config import Config
from tomadiff.errors import ConfigError
from tomadiff.models import Family
from tomadiff.runtime.registration import denoiser

from .rival import Rival, Settings, parameters

DEFAULTS = {"max_downsample": 4}  # its own default, 1, finds nothing to merge in SDXL


class ToMeSD(Rival):
    package, install = "tomesd", "tomesd"
    merges = per_step = True

    def refuse(self, family: Family) -> None:
        if family.name != "unet":
            raise ConfigError(f"tomesd knows UNets only, not {family.covers}; leave it out, or take tome")

    def check(self, part: str, settings: Settings, family: Family | None) -> None:
        super().check(part, settings, family)
        # beyond what our ToMe can do, the real one silently merges less
        Config(method="tome", ratio=settings["ratio"])

    def takes(self) -> Mapping[str, Parameter]:
        import tomesd

        return parameters(tomesd.apply_patch, "model")

    def resolved(self, settings: Settings) -> Settings:
        return super().resolved({**DEFAULTS, **settings})

    @contextmanager
    def on(self, target: Any, settings: Settings) -> Iterator[None]:
        import tomesd

        model, _ = denoiser(target)
        tomesd.apply_patch(model, **{**DEFAULTS, **settings})
        try:
            yield
        finally:
            tomesd.remove_patch(model)
