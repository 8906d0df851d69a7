"""Dense in fewer steps, optionally with another solver: what anybody can do without a package."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from inspect import Parameter
from typing import Any

from torch import nn

from tomadiff.errors import ConfigError
from tomadiff.models import Family
from tomadiff.tools.samplers import NAMES, sampled_by

from .rival import Rival, Settings, parameters


def _settings(count: int, solver: str | None = None) -> None: ...


class FewerSteps(Rival):
    def takes(self) -> Mapping[str, Parameter]:
        return parameters(_settings)

    def check(self, part: str, settings: Settings, family: Family | None) -> None:
        super().check(part, settings, family)
        count, solver = settings.get("count"), settings.get("solver", NAMES[0])
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"{part!r}: say how many steps, as in steps:13")
        if solver not in NAMES:
            raise ConfigError(f"{part!r}: unknown solver {solver!r}; there are {', '.join(NAMES)}")

    def on(self, target: Any, settings: Settings) -> AbstractContextManager[Any]:
        """Set the solver only: the caller passes the number of steps to the pipeline."""
        solver = settings.get("solver")
        if solver is None or isinstance(target, nn.Module):
            return nullcontext()
        return sampled_by(target, solver)
