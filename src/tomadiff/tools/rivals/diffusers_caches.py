"""The caches that diffusers has for transformers.

Left out are those that are made for other models: Pyramid Attention Broadcast, FasterCache and SeaCache save
in video, FasterCache with guidance in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import diffusers
import torch
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig
from diffusers.hooks import HookRegistry
from torch import nn

from tomadiff.errors import ConfigError
from tomadiff.models import Family
from tomadiff.runtime.registration import denoiser

from .rival import Rival, Settings, parameters


class DiffusersCache(Rival):
    config: ClassVar[Any]  # a dataclass of diffusers; None if this version doesn't have it

    def takes(self) -> Mapping[str, Parameter]:
        return parameters(self.config)

    def refuse(self, family: Family) -> None:
        if not any(hasattr(getattr(diffusers, model, None), "enable_cache") for model in family.models):
            name = self.config.__name__.removesuffix("Config")
            instead = "; take deepcache" if family.name == "unet" else ""
            raise ConfigError(f"{name} can't be had: diffusers has no caches for {family.covers}{instead}")

    @contextmanager
    def on(self, target: Any, settings: Settings) -> Iterator[None]:
        model, _ = denoiser(target)
        if not hasattr(model, "enable_cache"):
            raise ConfigError(f"diffusers has no caches for {type(model).__name__}")
        model.enable_cache(self.made(model, settings))
        try:
            yield
        finally:
            model.disable_cache()

    def made(self, model: nn.Module, settings: Settings) -> Any:
        return self.config(**settings)


class FirstBlock(DiffusersCache):
    config = FirstBlockCacheConfig
    decides = True


class TaylorSeer(DiffusersCache):
    """Keeps tensors in the model's precision by default: its own default, bfloat16, is less accurate."""

    config = TaylorSeerCacheConfig

    def made(self, model: nn.Module, settings: Settings) -> Any:
        dtype = settings.get("taylor_factors_dtype", model.dtype)
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError("taylorseer: taylor_factors_dtype is the name of a type, like float32")
        return self.config(**{**settings, "taylor_factors_dtype": dtype})

    def resolved(self, settings: Settings) -> Settings:
        return super().resolved({"taylor_factors_dtype": "the model's", **settings})


class MagCache(DiffusersCache):
    """Skips steps by how residuals grow from step to step, which is calibrated on a dense picture."""

    config: ClassVar[Any] = getattr(diffusers, "MagCacheConfig", None)
    decides = True
    _ratios: ClassVar[WeakKeyDictionary[nn.Module, list[float]]] = WeakKeyDictionary()

    def takes(self) -> Mapping[str, Parameter]:
        return parameters(self.config, "calibrate", "num_inference_steps")

    def refuse(self, family: Family) -> None:
        if self.config is None:
            raise ConfigError(
                f"diffusers {diffusers.__version__} has no MagCache yet: pip install -U diffusers"
            )
        super().refuse(family)

    def calibrate(self, target: Any, settings: Settings, draw: Callable[[], Any]) -> None:
        model, _ = denoiser(target)
        if "mag_ratios" in settings or model in self._ratios:
            return
        found: list[float] = []

        def look(*_: Any) -> None:  # the measured values are deleted at the end of the picture
            found[:] = max((state.calibration_ratios for state in _states(model)), key=len, default=[])

        model.enable_cache(self.config(calibrate=True, num_inference_steps=10**9))
        handle = model.register_forward_hook(look)
        try:
            draw()
        finally:
            handle.remove()
            model.disable_cache()
        self._ratios[model] = list(found)

    def made(self, model: nn.Module, settings: Settings) -> Any:
        ratios = settings.get("mag_ratios") or self._ratios.get(model) or [1.0]  # any will do for a check
        return self.config(**{**settings, "mag_ratios": ratios, "num_inference_steps": len(ratios)})


def _states(model: nn.Module) -> list[Any]:
    """MagCache's states of a model, one for each context of calls."""
    registries = (getattr(module, "_diffusers_hook", None) for module in model.modules())
    hooks = (
        registry.get_hook("mag_cache_leader_block_hook")
        for registry in registries
        if isinstance(registry, HookRegistry)
    )
    return [state for hook in hooks if hook is not None for state in hook.state_manager._state_cache.values()]
