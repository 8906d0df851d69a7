"""Where nothing was asked for, and no step can be forecast: does this model tolerate merged tokens?

Some don't, and would draw noise: small transformers, and models whose tokens have little in common. So in the
first call of a size, the model runs dense as well, and the two outputs are compared. If they differ too much,
the dense one counts, and nothing is merged at this size from then on.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from . import autotune
from .conflicts import cached
from .layout import Layout
from .model_call import ModelCall

if TYPE_CHECKING:
    from .session import Session

# The largest relative error of the merged output that is accepted if every step merges. In 8 stochastic steps
# (docs/quality.md), the embedded UNet has 0.2 and is closer merged than in fewer steps; with three quarters
# merged it has 0.36, and fewer steps are as close; the embedded Flux has 0.75 and draws noise.
LIMIT = 0.5
# And if the second half of the steps is dense, which mends much: the Flux is then closer than in fewer steps.
# Models with larger errors were not seen.
LIMIT_OF_FIRST_HALF = 0.8


class Tolerance:
    """The errors that merging made in the first call of each size of one model."""

    def __init__(self, session: Session) -> None:
        self._owner = weakref.ref(session)  # weakly, since the session holds this
        self._errors: dict[Layout, float] = {}

    @property
    def _session(self) -> Session:
        session = self._owner()
        assert session is not None
        return session

    @torch.compiler.disable
    def is_unknown(self, call: ModelCall) -> bool:
        """Whether a call merges because nothing was asked for, at a size of which nothing is known yet."""
        session = self._session
        return (
            session.config.merges_as_fallback
            and session.generation is not None
            and session.generation.schedule.merges  # else only keys of long sequences are merged
            and call.layout not in self._errors
            and any(task.merged for task in call.tasks)
            and self._may_call_twice()
        )

    def find_out(self, merged: ModelCall, args: tuple, kwargs: dict[str, Any]) -> tuple[ModelCall, Any]:
        """Run the model merged and dense; returns the call that counts, and its output."""
        session, layout = self._session, merged.layout
        again = autotune.copied((args, kwargs))
        output = session.run(merged, args, kwargs)
        if any(tensor.is_meta for tensor in _tensors(output)):
            return merged, output  # there are no values to compare
        which = (merged.step, merged.number, merged.shifted, layout)
        dense = ModelCall(*which, session.dense_tasks(), merged.plans, merged.times)
        reference = session.run(dense, *again)
        self._errors[layout] = relative_error(output, reference)
        if not self.refuses(layout):
            return merged, output
        merged.plans.clear()
        warnings.warn(
            f"nothing is done here: {session.counts.why}, and {self._told(layout)}, too much to merge "
            "unasked: take fewer steps instead, or give a ratio",
            stacklevel=2,
        )
        return dense, reference

    def refuses(self, layout: Layout) -> bool:
        """Whether merging is known to change the output too much; also if the error is NaN."""
        return layout in self._errors and not self._errors[layout] <= self._limit

    def found(self) -> list[str]:
        """For the report."""
        return [
            f"{' x '.join(map(str, layout.finest))} tokens: {self._told(layout)}, "
            + (
                f"and more than {self._limit:.0%} is not accepted"
                if self.refuses(layout)
                else "which is accepted"
            )
            for layout in self._errors
        ]

    @property
    def _limit(self) -> float:
        return LIMIT_OF_FIRST_HALF if self._session.ratios.ends_dense else LIMIT

    def _told(self, layout: Layout) -> str:
        return f"merging changed the model's output by {self._errors[layout]:.0%} in its first call"

    def _may_call_twice(self) -> bool:
        """Not where one more call would count as a step, or be compiled, or is no part of a generation."""
        session = self._session
        if torch.is_grad_enabled() or session.model.training:
            return False
        return not (cached(session.model) or session.is_compiled)


def relative_error(output: Any, reference: Any) -> float:
    """The root mean square of the difference, as a share of the reference's standard deviation."""
    pairs = zip(_tensors(output), _tensors(reference))
    squares = [((a - b).square().sum(), (b - b.mean()).square().sum()) for a, b in pairs]
    difference, variation = (torch.stack(list(sums)).sum() for sums in zip(*squares))
    return (difference / variation.clamp_min(torch.finfo(torch.float32).tiny)).sqrt().item()


def _tensors(output: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return [leaf.float() for leaf in leaves if leaf.is_floating_point()]
