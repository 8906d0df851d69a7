"""Helper functions that several declarations share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .family import Call

if TYPE_CHECKING:
    from torch import Tensor, nn


def latent_grid(model: nn.Module, latent: Tensor) -> tuple[int, ...]:
    """Rows and columns of a latent's patches; with 3-D patches, frames, rows and columns."""
    patch = model.config.patch_size
    patch = (patch, patch) if isinstance(patch, int) else patch
    return tuple(side // length for side, length in zip(latent.shape[-len(patch) :], patch))


def ada_norm(block: nn.Module, call: Call) -> Tensor:
    """Attention's input: the first output of a norm1 that also returns shifts, scales and gates."""
    return block.norm1(call["hidden_states"], emb=call["temb"])[0]


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def weigh_by(argument: str, axes: int = 4, text: str | None = None) -> Callable[[Call, Tensor], None]:
    """A `weigh_keys` that passes the bias as an additive mask, by `argument` or, in a dict, "argument.key".

    The mask has this many axes: the first is the batch, the last the keys. `text` names an argument whose
    tokens, if it is passed, come before the image's in the keys. A boolean mask that the caller passes (True:
    attend) stays in force.
    """

    outer, _, inner = argument.partition(".")

    def weigh(call: Call, bias: Tensor) -> None:
        if text is not None and call.get(text) is not None:
            import torch.nn.functional as F

            bias = F.pad(bias, (call[text].shape[1], 0))
        bias = bias.reshape(len(bias), *[1] * (axes - 2), -1)
        holder = dict(call.get(outer) or {}) if inner else call
        mask = holder.get(inner or outer)
        holder[inner or outer] = bias if mask is None else bias.masked_fill(~mask.bool(), float("-inf"))
        if inner:
            call[outer] = holder

    return weigh
