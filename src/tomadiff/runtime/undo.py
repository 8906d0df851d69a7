"""Undo an interrupted change of a module's hooks; undoing can itself be interrupted and repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# attributes that our hook and diffusers' hook registry set on a module
ATTRIBUTES = ("forward", "compile", "_compiled_call_impl", "_diffusers_hook")


class Snapshot:
    """The state of a module's hooks before a change."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = {name: vars(module)[name] for name in ATTRIBUTES if name in vars(module)}
        self._registry = self._attributes.get("_diffusers_hook")
        if self._registry is not None:
            self._hooks = dict(self._registry.hooks)
            self._order, self._references = [*self._registry._hook_order], [*self._registry._fn_refs]
            self._forwards = [(each.forward, each.original_forward) for each in self._references]

    def restore(self) -> None:
        for name in ATTRIBUTES:
            if name in self._attributes:
                vars(self._module)[name] = self._attributes[name]
            else:
                vars(self._module).pop(name, None)
        if self._registry is not None:
            self._registry.hooks = dict(self._hooks)
            self._registry._hook_order, self._registry._fn_refs = [*self._order], [*self._references]
            for reference, forwards in zip(self._references, self._forwards):
                reference.forward, reference.original_forward = forwards


def drop_pre_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Remove a pre-hook without its handle, which an interrupt may have lost."""
    for number, other in [*module._forward_pre_hooks.items()]:
        if other == hook:
            module._forward_pre_hooks_with_kwargs.pop(number, None)
            module._forward_pre_hooks.pop(number, None)
