"""What several declarations say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .family import Call

if TYPE_CHECKING:
    from torch import Tensor, nn


def latent_grid(model: nn.Module, latent: Tensor) -> tuple[int, ...]:
    """Rows and columns of patches of a latent, [B, C, h, w]; frames first, if patches have a length."""
    patch = model.config.patch_size
    patch = (patch, patch) if isinstance(patch, int) else patch
    return tuple(side // length for side, length in zip(latent.shape[-len(patch) :], patch))


def ada_norm(block: nn.Module, call: Call) -> Tensor:
    """Tokens as they go into attention, by a norm1 that returns them beside shifts, scales and gates."""
    return block.norm1(call["hidden_states"], emb=call["temb"])[0]


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def weigh_by(argument: str, axes: int = 4, text: str | None = None) -> Callable[[Call, Tensor], None]:
    """Hand the bias to an argument, or "argument.key" of a dict, that takes a mask of so many axes.

    The samples are the first of these axes, the keys the last.

    `text` is an argument whose tokens come in front, where it is given. A mask that is there already, True
    for what counts, stays in force.
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
