"""What a benchmark compares: contenders, each a method at a ratio."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from diffusers import DiffusionPipeline
from torch import nn

from tomadiff.config import ResolvedConfig
from tomadiff.models import family_of
from tomadiff.runtime.registration import attached, denoiser
from tomadiff.runtime.session import Session
from tomadiff.tools.method_spec import (
    METHODS,
    configuration,
    label,
    merges,
    parse,
    parts_of,
    rival_settings,
    switched_on,
)
from tomadiff.tools.rivals import RIVALS


@dataclass(frozen=True)
class Contender:
    """One method at one ratio. The model runs with it inside `with contender.use():`."""

    method: str
    ratio: float  # 0 for dense
    use: Callable[[], AbstractContextManager[Any]] = nullcontext
    patch: Session | None = None  # our own methods' session, which persists between uses
    call: Callable[[int], Any] | None = None  # runs the model at a step, or a whole generation
    warm_up: Callable[[int], Any] | None = None  # a shorter call to warm up with, if there is one

    @property
    def label(self) -> str:
        return label(self.method, self.ratio)

    @property
    def config(self) -> ResolvedConfig | None:
        return self.patch.config if self.patch else None

    @property
    def settings(self) -> dict[str, Any]:
        if self.config:
            return self.config.to_dict()
        if len(parts_of(self.method)) == 1 and (name := parse(self.method)[0]) in RIVALS:
            return RIVALS[name].resolved(rival_settings(self.method, self.ratio))
        return {"method": self.method, "ratio": self.ratio}

    @property
    def steps_per_plan(self) -> float:
        return self.config.steps_per_plan() if self.config else 1.0


def contender(model: nn.Module, pipeline: Any, method: str, ratio: float) -> Contender:
    joined = len(parts_of(method)) > 1
    if joined or parse(method)[0] not in METHODS or not (merges(method) or ratio):
        target = model if pipeline is None else pipeline
        return Contender(method, ratio, lambda: switched_on(target, method, ratio))
    family = family_of(model)
    config = configuration(method, ratio, family)
    if pipeline is None and config.resolve(family).merges:  # single calls are never forecast
        config = dataclasses.replace(config, interval=1)
    patch = Session(model, family, config, pipeline)
    return Contender(method, ratio, lambda: attached(patch), patch)


@contextmanager
def in_turns(
    pipe: DiffusionPipeline,
    whole: bool,
    todo: Sequence[tuple[str, float]],
    prepare: Callable[[DiffusionPipeline, str], None],
) -> Iterator[list[tuple[Contender, DiffusionPipeline]]]:
    """All contenders on the same pipeline, after `prepare(pipe, method)` for each of them."""
    for method, _ in todo:
        prepare(pipe, method)
    model, target = denoiser(pipe)[0], pipe if whole else None
    yield [(contender(model, target, method, ratio), pipe) for method, ratio in todo]
