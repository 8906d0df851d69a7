"""Where nothing was asked for, and no step can be forecast: does this model tolerate merged tokens?

Some don't, and would draw noise: small transformers, and models whose tokens have little in common. So in the
first call of a size, the model runs dense as well, and the two outputs are compared. If they differ too much,
the dense one counts, and nothing is merged at this size from then on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .layout import Layout

# The largest relative error of the merged output that is accepted. In 8 stochastic steps (docs/quality.md),
# the embedded UNet has 0.2 and is closer merged than in fewer steps; with three quarters merged it has 0.36,
# and fewer steps are as close; the embedded Flux has 0.75 and draws noise.
LIMIT = 0.5


class Tolerance:
    """The errors that merging made in the first call of each size."""

    def __init__(self) -> None:
        self._errors: dict[Layout, float] = {}

    def known(self, layout: Layout) -> bool:
        return layout in self._errors

    def refuses(self, layout: Layout) -> bool:
        """Whether merging is known to change the output too much; also if the error is NaN."""
        return self.known(layout) and not self._errors[layout] <= LIMIT

    def compare(self, layout: Layout, merged: Any, dense: Any) -> None:
        self._errors[layout] = relative_error(merged, dense)

    def told(self, layout: Layout) -> str:
        return f"merging changed the model's output by {self._errors[layout]:.0%} in its first call"

    def found(self) -> list[str]:
        """For the report."""
        return [
            f"{' x '.join(map(str, layout.finest))} tokens: {self.told(layout)}, "
            + (f"and more than {LIMIT:.0%} is not accepted" if self.refuses(layout) else "which is accepted")
            for layout in self._errors
        ]


def relative_error(output: Any, reference: Any) -> float:
    """The root mean square of the difference, as a share of the reference's standard deviation."""
    pairs = zip(_tensors(output), _tensors(reference))
    squares = [((a - b).square().sum(), (b - b.mean()).square().sum()) for a, b in pairs]
    difference, variation = (torch.stack(list(sums)).sum() for sums in zip(*squares))
    return (difference / variation.clamp_min(torch.finfo(torch.float32).tiny)).sqrt().item()


def _tensors(output: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return [leaf.float() for leaf in leaves if leaf.is_floating_point()]
