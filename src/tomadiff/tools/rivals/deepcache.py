"""DeepCache: a UNet's inner blocks run in every N-th step; in the others, their last output is reused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter
from typing import Any

from diffusers import UNet2DConditionModel
from torch import nn

from tomadiff.errors import ConfigError
from tomadiff.models import Family
from tomadiff.runtime.hook import parameter_names
from tomadiff.runtime.registration import denoiser

from .rival import Rival, Settings, parameters, restored


def _settings(interval: int = 3, branch: int = 0) -> None: ...


class DeepCache(Rival):
    package, install = "DeepCache", "DeepCache"

    def takes(self) -> Mapping[str, Parameter]:
        return parameters(_settings)

    def refuse(self, family: Family) -> None:
        if UNet2DConditionModel.__name__ not in family.models:
            raise ConfigError(f"deepcache knows UNets only, not {family.covers}; take dbcache")

    def check(self, part: str, settings: Settings, family: Family | None) -> None:
        super().check(part, settings, family)
        for name, least in (("interval", 1), ("branch", 0)):
            if settings.get(name, least) < least:
                raise ConfigError(f"{part!r}: {name} must be at least {least}")

    @contextmanager
    def on(self, target: Any, settings: Settings) -> Iterator[None]:
        if isinstance(target, nn.Module):
            raise ConfigError("deepcache counts the steps of a pipeline: give it one, not a model alone")
        unet = denoiser(target)[0]
        if not isinstance(unet, UNet2DConditionModel):
            raise ConfigError(f"deepcache knows UNet2DConditionModel only, not {type(unet).__name__}")
        chosen = self.resolved(settings)
        with restored(unet):
            helper = _helper(target)
            helper.set_params(cache_interval=chosen["interval"], cache_branch_id=chosen["branch"])
            helper.enable()
            yield


def _helper(pipe: Any) -> Any:
    from DeepCache import DeepCacheSDHelper

    class Helper(DeepCacheSDHelper):
        """DeepCache looks a timestep up by its value, and fails if a pipeline passes a batch or scales it."""

        def wrap_unet_forward(self) -> None:
            unet = self.pipe.unet
            self.function_dict["unet_forward"] = forward = unet.forward
            names = parameter_names(unet)

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                now = (dict(zip(names, args)) | kwargs)["timestep"].flatten()[0]
                timesteps = self.pipe.scheduler.timesteps
                self.cur_timestep = int((timesteps.to(now) - now).abs().argmin())
                return forward(*args, **kwargs)

            unet.forward = wrapped

    return Helper(pipe)
