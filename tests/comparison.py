"""What of a model and its outputs is compared."""

from __future__ import annotations

from torch import Tensor, nn

CHANGED = 1e-5  # rounding stays below


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def state(model: nn.Module) -> dict[str, set[str]]:
    """The attributes of every module: what a patch could leave behind."""
    return {name: set(vars(module)) for name, module in model.named_modules()}
