"""Sites in compiled models: merging and unmerging as operators that torch.compile takes as they are.

What a site does depends on more than tensors: on the step, on when a plan was made. A
compiler would follow all that, and compile again whenever it changes. So it sees operators, with tensors in
and out; the rest happens behind its back, in the same code that runs without a compiler. It writes over what
operators return as it likes, so they return nothing that anybody else holds: `_owned` sees to it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tomadiff.errors import ConfigError, UnsupportedModelError
from tomadiff.models import Call

from .sequence import Merged

if TYPE_CHECKING:
    from .hook import SiteHook

# a recorded CUDA graph would leave out all that is not on the device, which torch can be told from 2.8 on
TAGS = {"tags": [torch.Tag.cudagraph_unsafe]} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
_sites: weakref.WeakValueDictionary[int, SiteHook] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def number(site: SiteHook) -> int:
    """By which operators find a site."""
    n = next(_numbers)
    _sites[n] = site
    return n


class Region:
    """What is inside a block's hook, compiled for itself where blocks are compiled one by one.

    Then merging is outside, and what is compiled is the same for all blocks of a kind.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Any] | None = None  # of torch.compile, once asked for
        self.forward: Callable[..., Any] | None = None
        self._original: Callable[..., Any] | None = None

    def take(self, module: nn.Module) -> None:
        """From now on, `module.compile` is about the region, as `compile_repeated_blocks` calls it."""
        module.compile = self.compile
        if module._compiled_call_impl is not None:
            self.settings = _compiled[module][0]
            module._compiled_call_impl = None

    def compile(self, **settings: Any) -> None:
        self.settings, self._original = settings, None

    def settle(self, original: Callable[..., Any]) -> None:
        """Compile what is inside, if it is another than the last time."""
        if self.settings is not None and self._original is not original:
            self._original, self.forward = original, torch.compile(original, **self.settings)

    def give_back(self, module: nn.Module) -> None:
        """The block is compiled as if there had never been merging."""
        vars(module).pop("compile", None)
        if self.settings is not None:
            module.compile(**self.settings)
            _compiled[module] = (self.settings, module._compiled_call_impl)
        self.forward = self._original = None


# by ourselves, when merging was taken off: with which settings, and what came of it
_compiled: weakref.WeakKeyDictionary[nn.Module, tuple[dict[str, Any], Any]] = weakref.WeakKeyDictionary()


def by_others(module: nn.Module) -> bool:
    """Whether a module was compiled, and not by `Region.give_back`."""
    compiled = module._compiled_call_impl
    return compiled is not None and (module not in _compiled or _compiled[module][1] is not compiled)


def merge(site: SiteHook, call: Call, first: bool) -> Merged:
    whole = call[site.argument]
    names, tensors = _flat({site.argument: whole, **call})
    weighed = site.state.config.weigh_keys
    around = site.around(whole, in_order=first)
    sequence, destinations, bias = _merge(
        site.number, first, weighed, sum(around), site.short, names, tensors
    )
    return Merged(sequence, whole, destinations, bias if weighed else None, around)


def alike(site: SiteHook, other: Tensor, merged: Merged) -> Tensor:
    return _alike(site.number, *merged.around, other, merged.sequence)


def unmerge(site: SiteHook, y: Tensor, place: int, last: bool, done: bool, merged: Merged) -> Tensor:
    length = site.image if last else site.places
    return _unmerge(site.number, place, last, done, *merged.around, length, y, merged.sequence, merged.whole)


@torch.library.custom_op("tomadiff::merge", mutates_args=(), **TAGS)
def _merge(
    site: int, first: bool, weighed: bool, around: int, kept: int, names: str, tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    hook = _sites[site]
    merged = hook.merge(_call(names, tensors), first)
    if merged.sequence.shape[1] != around + kept:
        raise UnsupportedModelError(
            f"{hook.place.name} has other tokens than the image's: they can't be merged in compiled code"
        )
    bias = merged.key_bias if weighed else merged.sequence.new_empty(0)
    held = (*tensors, merged.destinations, bias, *_held(hook))
    sequence, destinations, bias = _owned((merged.sequence, merged.destinations, bias), held)
    return sequence, destinations, bias


@_merge.register_fake
def _(
    site: int, first: bool, weighed: bool, around: int, kept: int, names: str, tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    whole = tensors[0]
    return (
        whole.new_empty(len(whole), around + kept, whole.shape[2]),
        whole.new_empty(len(whole), kept, dtype=torch.long),
        whole.new_empty(len(whole), kept) if weighed else whole.new_empty(0),
    )


@torch.library.custom_op("tomadiff::alike", mutates_args=(), **TAGS)
def _alike(site: int, before: int, behind: int, other: Tensor, sequence: Tensor) -> Tensor:
    hook = _sites[site]
    result = hook.alike(other, _merged(site, before, behind, sequence, other))
    return _owned([result], (other, sequence, *_held(hook)))[0]


@_alike.register_fake
def _(site: int, before: int, behind: int, other: Tensor, sequence: Tensor) -> Tensor:
    return other.new_empty(len(other), sequence.shape[1], other.shape[2])


@torch.library.custom_op("tomadiff::unmerge", mutates_args=(), **TAGS)
def _unmerge(
    site: int,
    place: int,
    last: bool,
    done: bool,
    before: int,
    behind: int,
    length: int,
    y: Tensor,
    sequence: Tensor,
    whole: Tensor,
) -> Tensor:
    hook = _sites[site]
    merged, held = _merged(site, before, behind, sequence, whole), (y, sequence, whole, *_held(hook))
    return _owned([hook.unmerge(y, place, last, done, merged)], held)[0]


@_unmerge.register_fake
def _(
    site: int,
    place: int,
    last: bool,
    done: bool,
    before: int,
    behind: int,
    length: int,
    y: Tensor,
    sequence: Tensor,
    whole: Tensor,
) -> Tensor:
    return y.new_empty(len(y), before + length + behind, y.shape[2])


def _no_gradients(context: Any, *gradients: Any) -> None:
    raise ConfigError(
        "gradients can't go through merging in compiled code: train without torch.compile, "
        "or compile the blocks alone, with compile_repeated_blocks()"
    )


for _operator in (_merge, _alike, _unmerge):
    _operator.register_autograd(_no_gradients)


def _merged(site: int, before: int, behind: int, sequence: Tensor, whole: Tensor) -> Merged:
    plan = _sites[site].run.kept.plan
    return Merged(sequence, whole, plan.destinations, None, (before, behind), plan)


def _flat(call: Call) -> tuple[str, list[Tensor]]:
    """The tensors among the arguments, alone or in tuples, and their names."""
    flat = {}
    for name, value in call.items():
        if isinstance(value, Tensor):
            flat[name] = value
        elif isinstance(value, tuple):
            flat |= {f"{name}.{i}": part for i, part in enumerate(value) if isinstance(part, Tensor)}
    return "|".join(flat), list(flat.values())


def _call(names: str, tensors: Sequence[Tensor]) -> Call:
    call: Call = {}
    for name, tensor in zip(names.split("|"), tensors):
        name, _, place = name.partition(".")
        call[name] = (*call.get(name, ()), tensor) if place else tensor
    return call


def _owned(results: Iterable[Tensor], held: Iterable[Tensor]) -> list[Tensor]:
    """What operators return, as fake kernels promise it: contiguous, and in memory that nobody else holds."""
    taken = {x.untyped_storage().data_ptr() for x in held}
    owned = []
    for result in results:
        shared = result.untyped_storage().data_ptr() in taken
        owned.append(result.clone(memory_format=torch.contiguous_format) if shared else result.contiguous())
        taken.add(owned[-1].untyped_storage().data_ptr())
    return owned


def _held(hook: SiteHook) -> list[Tensor]:
    """What a site keeps from one operator, or one step, to the next."""
    kept, arranged = hook.run.kept, hook.run.arranged
    tensors = [] if arranged is None else [arranged]
    return tensors if kept is None else tensors + _tensors(kept.plan)


def _tensors(plan: Any) -> list[Tensor]:
    """Those of a plan, and of a plan inside it."""
    tensors: list[Tensor] = []
    for value in vars(plan).values():
        if isinstance(value, Tensor):
            tensors.append(value)
        elif hasattr(value, "merge"):
            tensors += _tensors(value)
    return tensors
