"""What of a model and its outputs is compared.

To the bit, where the same weights are called again with the same shapes. Weights at other addresses, other
batch sizes, threads and processes may add up in another order, which rounds otherwise on some CPUs: there,
outputs are compared up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CHANGED = 1e-5  # rounding stays below


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def alike(a: Tensor, b: Tensor, atol: float = 1e-3) -> bool:
    """Up to what rounding does to a plan, which a sharp assignment makes larger."""
    return torch.allclose(a, b, rtol=1e-3, atol=atol)


def mostly_alike(a: Tensor, b: Tensor, atol: float = 1e-3) -> bool:
    """a, b: [B, ...]. Whether at least half of the samples are alike.

    All are, unless two tokens are almost equally good as a destination. Then rounding decides between them,
    and another destination changes the output of a tiny model by up to half of what merging does.
    """
    return a.shape == b.shape and 2 * sum(alike(*pair, atol) for pair in zip(a, b)) >= len(a) > 1


def state(model: nn.Module) -> dict[str, set[str]]:
    """The attributes of every module: what a patch could leave behind."""
    return {name: set(vars(module)) for name, module in model.named_modules()}
