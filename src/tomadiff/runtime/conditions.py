"""What a call of the model is conditioned on, compared from call to call without waiting for the device.

A forecast holds only while everything but the noisy image and the time stays as it was. Text embeddings,
image embeddings, guidance and the like are the same tensors from step to step: they are compared by where
they lie in memory. Some arguments are made anew for each step (a ControlNet's residuals, a batch put
together in the loop): of these only shape and type are compared, once two steps have shown it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten


class Conditions:
    """The arguments of one call of a step, as they were in the step before."""

    def __init__(self) -> None:
        self._form: Any = None  # how dicts and lists among the arguments are nested
        self._marks: list[Mark] = []
        self._held: list[Any] = []  # while a tensor is held, no other can take its address
        self._made_anew: frozenset[int] | None = None  # places of arguments that no two steps share

    def changed(self, arguments: dict[str, Any], state: Any) -> bool:
        """Whether these, or the model's own state, are others than in the last call."""
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
        # what is made anew says nothing by its address, and may be large
        self._held = [leaf for i, leaf in enumerate(leaves) if i not in self._made_anew]
        return bool(moved - self._made_anew)


class Mark(NamedTuple):
    """What is noted of an argument: a change of its kind always counts, one of its identity mostly."""

    kind: Any
    identity: Any


def _mark(leaf: Any) -> Mark:
    if isinstance(leaf, Tensor):
        version = None if leaf.is_inference() else leaf._version  # which writing into it counts up
        place = (leaf.untyped_storage().data_ptr(), leaf.storage_offset(), leaf.stride(), version)
        return Mark((leaf.shape, leaf.dtype, leaf.device), place)
    plain = leaf is None or isinstance(leaf, (bool, int, float, str))
    return Mark(type(leaf), leaf if plain else id(leaf))


class Adapters:
    """The strengths of LoRA layers and IP-Adapters, which users may turn while a picture is drawn."""

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
