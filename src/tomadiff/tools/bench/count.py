"""Count FLOPs, bytes and kernel launches of a model's call on the meta device, without computing anything.

These don't depend on the machine, so what merging saves and adds can be predicted for models and GPUs that
are not at hand. Bytes depend on the model's dtype: for half precision, count a model in half precision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tomadiff.config import Config
from tomadiff.models import Family
from tomadiff.runtime.registration import attach, detach
from tomadiff.runtime.session import Session
from tomadiff.runtime.timing import Times

PHASES = ("model", "plan", "merge", "unmerge")  # the last three are tomadiff's
OVERHEAD = PHASES[1:]

# Operations that launch no kernel: views, which PyTorch marks as such, and these. They return the same memory
# in another shape, or uninitialised memory.
NO_LAUNCH = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
PICKING = {"gather", "index_select", "index", "embedding"}  # read only part of their first tensor
FILLING = {"copy_", "fill_", "zero_"}  # overwrite their first tensor without reading it
SCATTERING = {"scatter_", "index_put_"}  # write only as much of their first tensor as they are given


class Op(NamedTuple):
    """One kernel launch. Sorting and the like launch several, but count as one: counts are lower bounds."""

    name: str
    phase: str  # one of PHASES
    flops: int  # two per multiply-add of matrix products, convolutions and attention; 0 for everything else
    bytes: int  # read and written
    dtype: torch.dtype  # of the output
    # batch, rows and columns of what a matrix product, a convolution or attention computes
    product: tuple[int, int, int] | None = None
    rounds: int = 0  # of a loop inside the kernel, each of which waits for the one before


class Total(NamedTuple):
    launches: float
    flops: float
    bytes: float


@dataclass(frozen=True)
class Counts:
    """The launches of one or more calls. All totals are per call."""

    ops: Sequence[Op]
    calls: int = 1
    hooks: int = 0  # sites with our hooks, which take time of the host in every call

    def of(self, *phases: str) -> Total:
        ops = [op for op in self.ops if op.phase in phases]
        sums = len(ops), sum(op.flops for op in ops), sum(op.bytes for op in ops)
        return Total(*(value / self.calls for value in sums))

    @property
    def total(self) -> Total:
        return self.of(*PHASES)

    @property
    def model(self) -> Total:
        return self.of("model")

    @property
    def overhead(self) -> Total:
        return self.of(*OVERHEAD)


@dataclass(frozen=True)
class Cycle:
    """The steps from one choice of destinations to the next; all later steps repeat them."""

    steps: Sequence[Counts]
    hooks: int = 0

    @property
    def planning(self) -> Counts:
        """A step that makes new plans."""
        return self.steps[0]

    @property
    def reusing(self) -> Counts:
        """A step that recomputes as little as possible."""
        return min(self.steps, key=_planned)

    @property
    def refreshing(self) -> Counts | None:
        """A step that recomputes only weights, if there is one."""
        least, most = _planned(self.reusing), _planned(self.planning)
        return next((step for step in self.steps if least < _planned(step) < most), None)

    @property
    def per_step(self) -> Counts:
        """The average step."""
        return Counts([op for step in self.steps for op in step.ops], len(self.steps), self.hooks)


def _planned(counts: Counts) -> float:
    return counts.of("plan").launches


# What operations on the meta device return and launch, by their arguments. Models repeat theirs block by
# block, and most meta kernels of torch are in Python: without this, counting takes five times as long.
_KNOWN: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype, Op | None]] = {}


def _signature(value: Any) -> Any:
    """An argument as far as the shape of a result depends on it; equal numbers may differ in type."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    return type(value), value


class Counter(TorchDispatchMode):
    """Records every launch on the meta device. `phase()` returns the current phase, or None for the model."""

    def __init__(self, phase: Callable[[], str | None] = lambda: None) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self._phase = phase
        self._fused = _Fused(self)

    def __enter__(self) -> Counter:
        _counters.append(self)
        self._fused.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fused.__exit__(*error)
        _counters.remove(self)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func._schema.is_mutable:  # their output is not theirs alone
            return self._run(func, args, kwargs)[0]
        key = func, *map(_signature, args), *((name, _signature(value)) for name, value in kwargs.items())
        known = _KNOWN.get(key)
        if known is None:
            output, launch = self._run(func, args, kwargs)
            read, written = _tensors((args, kwargs)), _tensors(output)
            if (
                read
                and all(tensor.is_meta for tensor in (*read, *written))
                and isinstance(output, Tensor)
                and not any(output is tensor for tensor in read)
            ):
                _KNOWN[key] = output.shape, output.stride(), output.dtype, launch
            return output
        shape, stride, dtype, launch = known
        if launch is not None:
            self.add(launch)
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def _run(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Op | None]:
        """The output of an operation, and its launch if it is one."""
        output = func(*args, **kwargs)
        if not is_launch(func, (args, kwargs), output):
            return output, None
        formula = flop_registry.get(func.overloadpacket)
        flops = formula(*args, **kwargs, out_val=output) if formula else 0
        product = product_shape(func, output) if flops else None
        self.note(_name(func), flops, traffic(func, args, kwargs, output), output, product)
        return output, self.ops[-1]

    def note(
        self, name: str, flops: int, moved: int, output: Any, product: tuple[int, int, int] | None = None
    ) -> None:
        self.add(Op(name, "model", flops, moved, _tensors(output)[0].dtype, product))

    def add(self, op: Op) -> None:
        """Record a launch, in the current phase."""
        self.ops.append(op._replace(phase=self._phase() or "model"))


_counters: list[Counter] = []  # those that are counting


def note_kernel(op: Op) -> None:
    """Count a launch of a kernel that isn't PyTorch's."""
    for counter in _counters:
        counter.add(op)


class _Fused(TorchFunctionMode):
    """Counts functions that every GPU runs as one kernel, but that the meta device would decompose."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter
        self._kernels = {F.scaled_dot_product_attention: self._attention, F.rms_norm: self._rms_norm}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._kernels.get(func, func)(*args, **(kwargs or {}))

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor:
        keys, width = value.shape[-2:]
        output = query.new_empty(*query.shape[:-1], width)
        flops = 2 * math.prod(query.shape[:-1]) * keys * (query.shape[-1] + width)
        product = math.prod(query.shape[:-2]), query.shape[-2], width
        self._counter.note("attention", flops, size(query, key, value, attn_mask, output), output, product)
        return output

    def _rms_norm(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = torch.empty_like(input)
        self._counter.note("rms_norm", 0, size(input, args, kwargs, output), output)
        return output


def is_launch(func: OpOverload, inputs: Any, output: Any) -> bool:
    """Whether an operation launches a kernel on the model's device."""
    written = _tensors(output)
    if func.is_view or _name(func) in NO_LAUNCH or not written or written[0].device.type != "meta":
        return False
    # tensors from the host are cached tables, copied once; scalars are passed along with the launch
    return not any(tensor.device.type != "meta" and tensor.ndim for tensor in _tensors(inputs))


def product_shape(func: OpOverload, output: Tensor) -> tuple[int, int, int]:
    """Batch, rows and columns of a product; a convolution is one with a row for each pixel."""
    shape = output.shape
    if "conv" in _name(func):
        return 1, shape[0] * math.prod(shape[2:]), shape[1]
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def traffic(func: OpOverload, args: tuple, kwargs: dict[str, Any], output: Any) -> int:
    """The bytes that a kernel reads and writes, with each tensor counted once."""
    outs = {argument.name for argument in func._schema.arguments if argument.is_out}
    read = _tensors((args, {name: value for name, value in kwargs.items() if name not in outs}))
    if _name(func) in PICKING:
        return size(read[1:], output, output)
    if _name(func) in SCATTERING:
        return size(read[1:], read[-1])
    return size(read[1:] if _name(func) in FILLING else read, output)


def size(*values: Any) -> int:
    """The bytes of all tensors in these values; along an expanded dimension, memory counts once."""
    return sum(
        tensor.element_size() * math.prod(n for n, stride in zip(tensor.shape, tensor.stride()) if stride)
        for tensor in _tensors(values)
    )


def _name(func: OpOverload) -> str:
    return func.overloadpacket.__name__


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class MetaTimes(Times):
    """Times for a model on the meta device, which autocast doesn't support."""

    overhead = Times.spent


def patch_for_counting(
    model: nn.Module, family: Family, config: Config, grid: tuple[int, ...], kernels: bool = False
) -> Session:
    """A session with a fixed grid: families may read it from tensor values, which the meta device lacks.

    It has no forecast steps: their cost is known, and their number depends on the generation. kernels: count
    the Triton kernels, as they are used on CUDA, instead of the operations of core.
    """
    family = dataclasses.replace(
        family, grid=lambda model, *sources: grid, reference_tokens=lambda model, *sources: (0, 0)
    )
    config = dataclasses.replace(config, interval=1)
    patch = Session(model, family, config)
    patch.times = MetaTimes()
    if kernels:
        from .kernel_counts import by_kernels

        for hook in patch.sites:
            hook.planner.method = by_kernels(hook.planner.method)
    return patch


@torch.no_grad()
def count(call: Callable[[int], Any], patch: Session | None = None) -> Cycle:
    """Count what `call(step)` launches, step by step; `patch` is attached meanwhile.

    The timestep of a call must be a view of an entry in one table, as in a pipeline: `table[step]`.
    """
    if patch is None:
        return Cycle([_counted(call, 0, lambda: None)])
    shift, period = patch.config.shift, patch.config.refresh.destinations
    if shift:
        period += period % 2  # layouts alternate, so a plan is used every second step, and its age is even
    steps: list[Counts] = []
    reusing: dict[bool, Counts] = {}  # by layout: all steps that only reuse plans are alike
    attach(patch)
    patch.forget()
    try:
        for step in range(period):
            shifted = shift and step % 2 == 1
            plans = patch.plans
            if shifted in reusing and not any(plans.due(kept, step) for kept in plans.values()):
                steps.append(reusing[shifted])
                continue
            # set the clock by hand, since earlier steps may have been left out
            patch.clock.step, made = step - 1, patch.counts.refreshes.copy()
            steps.append(_counted(call, step, lambda: patch.times.phase))
            if patch.counts.refreshes == made:
                reusing[shifted] = steps[-1]
    finally:
        detach(patch)
    return Cycle(steps, len(patch.hooks))


def _counted(call: Callable[[int], Any], step: int, phase: Callable[[], str | None]) -> Counts:
    with Counter(phase) as counter:
        call(step)
    return Counts(counter.ops)
