"""Detect changes of a model's conditioning from step to step, without synchronising the device.

A forecast is valid only while everything except the noisy image and the timestep stays the same. Text
embeddings, image embeddings, guidance and the like are the same tensors in every step, so their memory
addresses are compared. Other arguments are new tensors in every step, such as ControlNet residuals or a batch
that is concatenated in the loop. Two steps show which ones; from then on, only their shapes and dtypes are
compared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten


class Conditions:
    """The arguments of one call of a step, compared with those of the same call in the last step."""

    def __init__(self) -> None:
        self._form: Any = None  # the pytree structure of the arguments
        self._marks: list[Mark] = []
        self._held: list[Any] = []  # tensors that are kept alive, so that no other can get their address
        # indices of the leaves that are new tensors in every step; None until two steps were compared
        self._made_anew: frozenset[int] | None = None

    def changed(self, arguments: dict[str, Any], state: Any) -> bool:
        """Whether the arguments, or the model's own state, have changed since the last step."""
        leaves, form = tree_flatten([dict(sorted(arguments.items())), state])
        marks = [_mark(leaf) for leaf in leaves]
        before, self._marks, self._held = self._marks, marks, leaves
        alike = form == self._form and [mark.kind for mark in before] == [mark.kind for mark in marks]
        self._form = form
        if not alike:
            self._made_anew = None
            return True
        moved = {i for i, (a, b) in enumerate(zip(before, marks)) if a.identity != b.identity}
        if self._made_anew is None:
            self._made_anew = frozenset(moved)
        # the address of a new tensor means nothing, and keeping it alive may take much memory
        self._held = [leaf for i, leaf in enumerate(leaves) if i not in self._made_anew]
        return bool(moved - self._made_anew)

    @property
    def same(self) -> bool:
        """Whether two steps were compared, and every argument was the same tensor.

        If not, nobody knows yet whether one was replaced, or is a new tensor in every step.
        """
        return self._made_anew == frozenset()


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
