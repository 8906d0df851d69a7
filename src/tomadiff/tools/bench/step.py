"""One call of a denoiser, captured from its pipeline, that can be repeated at any step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tomadiff.models import family_of
from tomadiff.runtime.hook import parameter_names
from tomadiff.runtime.registration import denoiser

from .models import first_call

STEPS = 1000  # entries in the table of timesteps


@dataclass(frozen=True)
class Step:
    """One call of a denoiser: `step(n)` makes it at step n, from 0 to 999."""

    model: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    place: int | str  # index or name of the argument with the timestep
    table: Tensor  # falling timesteps, like a scheduler's; tomadiff infers the step from the view of an entry

    @torch.no_grad()
    def __call__(self, n: int) -> Any:
        args, kwargs = [*self.args], {**self.kwargs}
        arguments: Any = args if isinstance(self.place, int) else kwargs
        arguments[self.place] = self.table[n].expand_as(arguments[self.place])
        return self.model(*args, **kwargs)

    def argument(self, name: str) -> Any:
        """An argument of the call, by name."""
        return (dict(zip(parameter_names(self.model), self.args)) | self.kwargs).get(name)

    def on(self, model: nn.Module) -> Step:
        """The same call, of another model and on its device."""
        device = next(model.parameters()).device
        args, kwargs, table = tree_map_only(
            Tensor, lambda tensor: tensor.to(device), (self.args, self.kwargs, self.table)
        )
        return replace(self, model=model, args=args, kwargs=kwargs, table=table)


def capture(pipe: DiffusionPipeline, arguments: dict[str, Any]) -> Step:
    """Capture a pipeline's first call of its denoiser."""
    model, _ = denoiser(pipe)
    args, kwargs = first_call(pipe, arguments)
    if "sample" in kwargs:  # tomesd looks for a UNet's sample among the positional arguments
        args = (kwargs["sample"], *args)
        kwargs = {name: value for name, value in kwargs.items() if name != "sample"}
    time = family_of(model).time
    if time is None:
        raise ValueError(f"{type(model).__name__} isn't told the time, and can't be called at a step")
    place = time if time in kwargs else parameter_names(model).index(time)
    timestep: Tensor = kwargs[place] if isinstance(place, str) else args[place]
    first = timestep.flatten()[0]
    # computed on the device: reading the value would synchronise, and a meta tensor has none
    table = (first * torch.linspace(1, 0, STEPS, device=first.device)).to(first.dtype)
    return Step(model, args, kwargs, place, table)
