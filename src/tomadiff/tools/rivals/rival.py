"""The interface of other methods: which models they support, their settings, how to apply them."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, ClassVar

from torch import nn

from tomadiff.errors import ConfigError
from tomadiff.models import Family

Settings = dict[str, Any]


class Rival(ABC):
    """A method of another package, or of the sampler."""

    package: ClassVar[str | None] = None  # the package to import; None if it is diffusers
    install: ClassVar[str] = ""  # the argument of `pip install` for it
    merges: ClassVar[bool] = False  # whether it takes a ratio of tokens to remove
    decides: ClassVar[bool] = False  # tensor values decide what runs, so pictures differ in work
    per_step: ClassVar[bool] = False  # whether all steps are alike, so that single calls show what it does

    @abstractmethod
    def takes(self) -> Mapping[str, inspect.Parameter]:
        """The settings that it takes, by name."""

    @abstractmethod
    def on(self, target: Any, settings: Settings) -> AbstractContextManager[Any]:
        """Apply it to a pipeline or a model for the length of a `with` block."""

    def refuse(self, family: Family) -> None:  # noqa: B027
        """Raise a ConfigError for a family of models that it doesn't support."""

    def calibrate(self, target: Any, settings: Settings, draw: Callable[[], Any]) -> None:  # noqa: B027
        """Measure on a dense picture what it needs to know about a model."""

    def check(self, part: str, settings: Settings, family: Family | None) -> None:
        """Raise a ConfigError if it is not installed, or doesn't support the settings or the family."""
        if family is not None:
            self.refuse(family)
        if self.package and find_spec(self.package) is None:
            raise ImportError(f"{part!r} needs {self.install}: pip install '{self.install}'")
        known = self.takes()
        for name, value in settings.items():
            if name not in known:
                raise ConfigError(f"{part!r}: unknown setting {name!r}; there are {', '.join(known)}")
            default = known[name].default
            if isinstance(default, (int, float)) and not isinstance(value, (int, float)):
                raise ConfigError(f"{part!r}: {name} is no word, but something like {default}")

    def resolved(self, settings: Settings) -> Settings:
        """All settings, with the package's defaults for those that were not given."""
        defaults = {name: p.default for name, p in self.takes().items() if p.default is not p.empty}
        of = {"version": version(self.install)} if self.package else {}
        return {**of, **defaults, **settings}


def parameters(function: Callable[..., Any], *left_out: str) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters
    return {name: parameter for name, parameter in found.items() if name not in left_out}


@contextmanager
def restored(model: nn.Module, pipe: Any = None) -> Iterator[None]:
    """Afterwards, the attributes of a model's modules and of a pipeline's class are as they were before.

    Packages that replace `forward` leave the original behind as an attribute of each module. And cache-dit
    takes lists of blocks out and puts them back last, so that others would find the blocks in another order.
    """
    kept = [(module, dict(vars(module)), dict(module._modules)) for module in model.modules()]
    owner = type(pipe)
    of_class = dict(vars(owner))
    try:
        yield
    finally:
        for module, attributes, children in kept:
            _refill(vars(module), attributes)
            _refill(module._modules, children)
        if pipe is not None:
            for name in set(vars(owner)) - set(of_class):
                delattr(owner, name)
            for name, value in of_class.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)


def _refill(mapping: dict[str, Any], content: dict[str, Any]) -> None:
    mapping.clear()
    mapping.update(content)
