"""Count the FLOPs of a denoiser in a generation, including everything that is attached to it.

Unlike times, they don't depend on the machine, nor on what else runs there. Text encoders, decoders and what
samplers and caches add up outside of the denoiser don't count. Inside, all matrix products, convolutions and
attention do, also those of merging.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tomadiff.runtime.registration import denoisers

# torch has formulas only for CUDA's attention; that of other devices takes the same arguments
ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math_for_mps")
FORMULAS = dict(flop_registry)
for _name in ATTENTION:
    if hasattr(torch.ops.aten, _name):
        _formula = flop_registry[torch.ops.aten._scaled_dot_product_efficient_attention]
        FORMULAS.setdefault(getattr(torch.ops.aten, _name), _formula)
BASIC: set[OpOverload] = set()  # operations that turned out not to be made of others


@contextmanager
def counted(target: Any) -> Iterator[Work]:
    """Count the work of a pipeline's denoisers for the length of a `with` block."""
    work, models = Work(), [model for model, _ in denoisers(target)]
    handles = [model.register_forward_pre_hook(work.enter, prepend=True) for model in models]
    handles += [model.register_forward_hook(work.leave, always_call=True) for model in models]
    try:
        with work:
            yield work
    finally:
        for handle in handles:
            handle.remove()


class Work(TorchDispatchMode):
    """FLOPs of what is computed between `enter` and `leave`."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self._inside = 0

    def enter(self, *_: Any) -> None:
        self._inside += 1

    def leave(self, *_: Any) -> None:
        self._inside -= 1

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = FORMULAS.get(func.overloadpacket)
        if formula is None and self._inside and func not in BASIC:
            with self:  # in inference mode, operations come here before they are taken apart
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
            BASIC.add(func)
        output = func(*args, **kwargs)
        if formula is not None and self._inside:
            self.flops += formula(*args, **kwargs, out_val=output)
        return output
