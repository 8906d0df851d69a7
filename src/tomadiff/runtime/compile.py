"""Sites in compiled models: merging and unmerging as custom operators, which torch.compile doesn't trace.

What a site does depends on more than tensors: on the step, and on the age of a plan. A compiler would trace
all of that, and recompile whenever it changes. So it sees only operators with tensors in and out; inside them
runs the same code as without a compiler. Compiled code may overwrite what operators return, so they must not
return tensors that are used elsewhere: `_owned` makes copies where needed.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from tomadiff.core import MergePlan
from tomadiff.errors import ConfigError, UnsupportedModelError
from tomadiff.models import Call

from .capture import check_not_captured
from .model_call import SpanState
from .plan_cache import tensors_of

if TYPE_CHECKING:
    from .hook import SiteHook

# from torch 2.8 on, this tag keeps the operators out of CUDA graphs, which would not repeat their host code
TAGS = {"tags": [torch.Tag.cudagraph_unsafe]} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
PROGRAMS = 64
_sites: weakref.WeakValueDictionary[int, SiteHook] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def number(site: SiteHook) -> int:
    """Register a site, and return the number by which operators find it."""
    n = next(_numbers)
    _sites[n] = site
    return n


class BlockCompiler:
    """Compiles the block inside its hook, for models whose blocks are compiled one by one.

    Merging then stays outside the compiled code, which is the same for all blocks of a kind.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Any] | None = None  # for torch.compile; None if not requested
        self.forward: Callable[..., Any] | None = None
        self._original: Callable[..., Any] | None = None

    def take(self, module: nn.Module) -> None:
        """Make `module.compile`, which `compile_repeated_blocks` calls, compile only inside the hook."""
        module.compile = self.compile
        if module._compiled_call_impl is not None:
            self.settings = _compiled[module][0]
            module._compiled_call_impl = None

    def compile(self, **settings: Any) -> None:
        self.settings, self._original = settings, None

    def compile_inside(self, original: Callable[..., Any]) -> None:
        """Compile the inside, if that was requested and `original` has changed since the last time."""
        if self.settings is not None and self._original is not original:
            # Compile lengths as constants unless told otherwise: some blocks get all tokens, others merged
            # ones, and torch would switch to dynamic lengths.
            if "dynamic" not in self.settings:
                _allow_many_programs()
            settings = {"dynamic": False, **self.settings}
            self._original, self.forward = original, torch.compile(original, **settings)

    def give_back(self, module: nn.Module) -> None:
        """Compile the block itself with the same settings, as if it had never been merged."""
        vars(module).pop("compile", None)
        if self.settings is not None:
            module.compile(**self.settings)
            _compiled[module] = (self.settings, module._compiled_call_impl)
        self.forward = self._original = None


def _allow_many_programs() -> None:
    """Raise torch's limit on compiled versions of a function, 8 by default: there is one per length."""
    config: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # until torch 2.6
    setattr(config, name, max(getattr(config, name), PROGRAMS))


# modules that `give_back` compiled, with their settings and the result
_compiled: weakref.WeakKeyDictionary[nn.Module, tuple[dict[str, Any], Any]] = weakref.WeakKeyDictionary()


def by_others(module: nn.Module) -> bool:
    """Whether a module was compiled, and not by `BlockCompiler.give_back`."""
    compiled = module._compiled_call_impl
    return compiled is not None and (module not in _compiled or _compiled[module][1] is not compiled)


def perform(site: SiteHook, action: str, *args: Any) -> Any:
    """Call a site's method "merge", "merge_like" or "unmerge"; in compiled code, through its operator."""
    if is_compiling():
        return OPERATORS[action](site, *args)
    return getattr(site, action)(*args)


def _operate_merge(site: SiteHook, inputs: Call) -> SpanState:
    whole = inputs[site.argument]
    names, tensors = _flat({site.argument: whole, **inputs})
    weighed = site.config.weigh_keys
    prefix, suffix = site.around(whole)
    kept = site.session.require_call(site).tasks[site.index].kept
    sequence, destinations, bias = _merge(site.number, weighed, prefix + suffix, kept, names, tensors)
    return SpanState(sequence, whole, destinations, bias if weighed else None, prefix, suffix)


def _operate_merge_like(site: SiteHook, other: Tensor, span: SpanState) -> Tensor:
    return _merge_like(site.number, span.prefix, span.suffix, other, span.sequence)


def _operate_unmerge(site: SiteHook, y: Tensor, span: SpanState) -> Tensor:
    return _unmerge(site.number, span.prefix, span.suffix, y, span.sequence, span.original)


OPERATORS: dict[str, Callable[..., Any]] = {
    "merge": _operate_merge,
    "merge_like": _operate_merge_like,
    "unmerge": _operate_unmerge,
}


@torch.library.custom_op("tomadiff::merge", mutates_args=(), **TAGS)
def _merge(
    site: int, weighed: bool, around: int, kept: int, names: str, tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    check_not_captured()
    hook = _sites[site]
    span = hook.merge(_call(names, tensors))
    if span.sequence.shape[1] != around + kept:
        raise UnsupportedModelError(
            f"{hook.bound.name} has other tokens than the image's: they can't be merged in compiled code"
        )
    bias = span.sequence.new_empty(0) if span.key_bias is None else span.key_bias
    held = (*tensors, span.destinations, bias, *_held(hook))
    sequence, destinations, bias = _owned((span.sequence, span.destinations, bias), held)
    return sequence, destinations, bias


@_merge.register_fake
def _(
    site: int, weighed: bool, around: int, kept: int, names: str, tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    whole = tensors[0]
    return (
        whole.new_empty(len(whole), around + kept, whole.shape[2]),
        whole.new_empty(len(whole), kept, dtype=torch.long),
        whole.new_empty(len(whole), kept) if weighed else whole.new_empty(0),
    )


@torch.library.custom_op("tomadiff::merge_like", mutates_args=(), **TAGS)
def _merge_like(site: int, prefix: int, suffix: int, other: Tensor, sequence: Tensor) -> Tensor:
    check_not_captured()
    hook = _sites[site]
    span = SpanState(sequence, other, _plan(hook).destinations, None, prefix, suffix)
    return _owned([hook.merge_like(other, span)], (other, sequence, *_held(hook)))[0]


@_merge_like.register_fake
def _(site: int, prefix: int, suffix: int, other: Tensor, sequence: Tensor) -> Tensor:
    return other.new_empty(len(other), sequence.shape[1], other.shape[2])


@torch.library.custom_op("tomadiff::unmerge", mutates_args=(), **TAGS)
def _unmerge(site: int, prefix: int, suffix: int, y: Tensor, sequence: Tensor, original: Tensor) -> Tensor:
    check_not_captured()
    hook = _sites[site]
    span = SpanState(sequence, original, _plan(hook).destinations, None, prefix, suffix)
    return _owned([hook.unmerge(y, span)], (y, sequence, original, *_held(hook)))[0]


@_unmerge.register_fake
def _(site: int, prefix: int, suffix: int, y: Tensor, sequence: Tensor, original: Tensor) -> Tensor:
    return y.new_empty(len(y), original.shape[1] - sequence.shape[1] + y.shape[1], y.shape[2])


def _plan(hook: SiteHook) -> MergePlan:
    """The plan of the span that a site is in."""
    return hook.session.require_call(hook).span_plans[hook.span.number].plan


def _no_gradients(context: Any, *gradients: Any) -> None:
    raise ConfigError(
        "gradients can't go through merging in compiled code: train without torch.compile, "
        "or compile the blocks alone, with compile_repeated_blocks()"
    )


for _operator in (_merge, _merge_like, _unmerge):
    _operator.register_autograd(_no_gradients)


def _flat(call: Call) -> tuple[str, list[Tensor]]:
    """Names and values of the tensors among the arguments, including those in tuples."""
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
    """The results as the fake kernels promise them: contiguous, and sharing no memory with `held`."""
    taken = {x.untyped_storage().data_ptr() for x in held}
    owned = []
    for result in results:
        shared = result.untyped_storage().data_ptr() in taken
        owned.append(result.clone(memory_format=torch.contiguous_format) if shared else result.contiguous())
        taken.add(owned[-1].untyped_storage().data_ptr())
    return owned


def _held(hook: SiteHook) -> list[Tensor]:
    """The tensors that a site keeps from one operator, or one step, to the next."""
    return tensors_of(_plan(hook))
