"""cache-dit's DBCache: the output of a transformer's first blocks decides whether the others run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter
from typing import Any

from torch import nn

from tomadiff.errors import ConfigError
from tomadiff.models import Family
from tomadiff.runtime.registration import denoiser

from .rival import Rival, Settings, parameters, restored


def _taylorseer(taylorseer: bool = False, taylorseer_order: int = 1) -> None: ...


class DBCache(Rival):
    package, install = "cache_dit", "cache-dit"
    decides = True

    def takes(self) -> Mapping[str, Parameter]:
        import cache_dit

        return parameters(cache_dit.DBCacheConfig, "cache_type") | parameters(_taylorseer)

    def refuse(self, family: Family) -> None:
        if family.name == "unet":
            raise ConfigError(f"dbcache knows transformers only, not {family.covers}; take deepcache")

    @contextmanager
    def on(self, target: Any, settings: Settings) -> Iterator[None]:
        import cache_dit

        if isinstance(target, nn.Module):
            raise ConfigError("dbcache begins anew with each call of a pipeline: give it one, not a model")
        own = parameters(_taylorseer)
        config = cache_dit.DBCacheConfig(**{k: v for k, v in settings.items() if k not in own})
        forecast = None
        if settings.get("taylorseer"):
            order = settings.get("taylorseer_order", 1)
            forecast = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=order)
        transformer = denoiser(target)[0]
        with restored(transformer, target), _quiet():
            adapter = _adapter(target, transformer)
            cache_dit.enable_cache(adapter, cache_config=config, calibrator_config=forecast)
            try:
                yield
            finally:
                cache_dit.disable_cache(adapter)


def _adapter(pipe: Any, transformer: nn.Module) -> Any:
    """How cache-dit finds the blocks: by the pipeline's class, or else by the transformer's."""
    from cache_dit import BlockAdapterRegister

    adapter = BlockAdapterRegister.get_adapter(pipe)
    if adapter is None:
        adapter = BlockAdapterRegister.get_adapter(transformer)
        if adapter is None:
            raise ConfigError(f"dbcache can't be had: cache-dit doesn't know {type(transformer).__name__}")
        adapter.pipe = pipe
    return adapter


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence cache-dit, which logs every time that it is switched on or off: here, for each picture."""
    handlers = logging.getLogger("CACHE_DIT").handlers  # shared by all of its loggers
    before = [handler.level for handler in handlers]
    for handler in handlers:
        handler.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for handler, level in zip(handlers, before):
            handler.setLevel(level)
