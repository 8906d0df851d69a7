"""Sequences of tokens: the picture's, which are merged, among those that never are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tomadiff.core import MergePlan


class Merged(NamedTuple):
    """What a site runs on, and what follows from it."""

    sequence: Tensor  # with merged tokens
    whole: Tensor  # the sequence before
    destinations: Tensor  # [B, K] token numbers
    key_bias: Tensor | None  # [B, K] to add to the logits of merged keys
    around: tuple[int, int]  # tokens before and behind the picture's, which are never merged
    plan: MergePlan | None = None  # what compiled code does not see


def picture(sequence: Tensor, around: tuple[int, int]) -> Tensor:
    """The picture's tokens of a sequence, [B, S, C]."""
    before, behind = around
    return sequence[:, before : sequence.shape[1] - behind] if before or behind else sequence


def with_image_tokens(sequence: Tensor, around: tuple[int, int], tokens: Tensor) -> Tensor:
    """A sequence with other tokens for its picture."""
    before, behind = around
    if not before and not behind:
        return tokens
    return torch.cat([sequence[:, :before], tokens, sequence[:, sequence.shape[1] - behind :]], dim=1)
