"""Detect changes of a model's conditioning from step to step, without synchronising the device.

A forecast is valid only while everything except the noisy image and the timestep stays the same. Text
embeddings, image embeddings, guidance and the like are the same tensors in every step, so their memory
addresses are compared. Other arguments are new tensors in every step, such as ControlNet residuals or a batch
that is concatenated in the loop. Three steps show which ones; from then on, only their shapes and dtypes are
compared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from .undo import drop_pre_hook


class Conditions:
    """The arguments of one call of a step, compared with those of the same call in the last step."""

    def __init__(self) -> None:
        self._form: Any = None  # the pytree structure of the arguments
        self._marks: list[Mark] = []
        self._held: list[Any] = []  # tensors that are kept alive, so that no other can get their address
        self._compared = 0  # number of steps that were compared with the one before
        self._made_anew: frozenset[int] = frozenset()  # indices of the leaves that are new in every step

    def changed(self, arguments: dict[str, Any], state: Any) -> bool:
        """Whether the arguments, or the model's own state, have changed since the last step."""
        leaves, form = tree_flatten([dict(sorted(arguments.items())), state])
        marks = [_mark(leaf) for leaf in leaves]
        before, self._marks, self._held = self._marks, marks, leaves
        alike = form == self._form and [mark.kind for mark in before] == [mark.kind for mark in marks]
        self._form = form
        if not alike:
            self._compared, self._made_anew = 0, frozenset()
            return True
        self._compared += 1
        moved = frozenset(i for i, (a, b) in enumerate(zip(before, marks)) if a.identity != b.identity)
        if self._compared == 1:  # replaced once, or new in every step? the next step tells
            self._made_anew = moved
            return False
        replaced = moved - self._made_anew
        if self._compared == 2:
            replaced |= self._made_anew - moved
            self._made_anew &= moved
        # the address of a new tensor means nothing, and keeping it alive may take much memory
        self._held = [leaf for i, leaf in enumerate(leaves) if i not in self._made_anew]
        return bool(replaced)

    @property
    def same(self) -> bool:
        """Whether steps were compared, and every argument was the same tensor."""
        return self._compared > 0 and not self._made_anew


class Mark(NamedTuple):
    """What is remembered of an argument."""

    kind: Any  # shape, dtype and device; if it differs, the argument has changed
    identity: Any  # memory address and version; if it differs, the argument has changed or is a new tensor


def _mark(leaf: Any) -> Mark:
    if isinstance(leaf, Tensor):
        version = None if leaf.is_inference() else leaf._version  # in-place writes increment it
        place = (leaf.untyped_storage().data_ptr(), leaf.storage_offset(), leaf.stride(), version)
        return Mark((leaf.shape, leaf.dtype, leaf.device), place)
    plain = leaf is None or isinstance(leaf, (bool, int, float, str))
    return Mark(type(leaf), leaf if plain else id(leaf))


class Adapters:
    """The scales of LoRA layers and IP-Adapters, which users may change during a generation."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._layers = [module for module in modules if isinstance(getattr(module, "scaling", None), dict)]
        processors: list[Any] = [getattr(module, "processor", None) for module in modules]
        self._processors = [each for each in processors if isinstance(getattr(each, "scale", None), list)]

    def state(self) -> list[Any]:
        return [
            [[*each.scaling.values(), each.disable_adapters, *each.active_adapters] for each in self._layers],
            [[*each.scale] for each in self._processors],
        ]


class ControlScale:
    """A pre-hook on a ControlNet that records how strongly it acts.

    A pipeline may switch its ControlNet on and off during a generation. The residuals don't tell: they are
    new tensors in every step, and zeros where it is off.
    """

    def __init__(self) -> None:
        self.value: Any = None

    def __call__(self, controlnet: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.value = kwargs.get("conditioning_scale")


def watch_controlnet(pipeline: Any) -> None:
    """Put a `ControlScale` on the pipeline's ControlNet, if it has one."""
    controlnet = getattr(pipeline, "controlnet", None)
    if isinstance(controlnet, nn.Module) and not _watches(controlnet):
        controlnet.register_forward_pre_hook(ControlScale(), with_kwargs=True)


def unwatch_controlnet(pipeline: Any) -> None:
    controlnet = getattr(pipeline, "controlnet", None)
    for watch in _watches(controlnet):
        drop_pre_hook(controlnet, watch)


def scale_of_controlnet(pipeline: Any) -> Any:
    """What the pipeline's ControlNet was last called with."""
    return [watch.value for watch in _watches(getattr(pipeline, "controlnet", None))]


def _watches(controlnet: Any) -> list[ControlScale]:
    hooks = getattr(controlnet, "_forward_pre_hooks", None) or {}
    return [hook for hook in hooks.values() if isinstance(hook, ControlScale)]
