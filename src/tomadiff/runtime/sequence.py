"""Sequences of tokens: the image's, which are merged, among those that never are."""

from __future__ import annotations

import torch
from torch import Tensor


def image_tokens(sequence: Tensor, prefix: int, suffix: int) -> Tensor:
    """The image's tokens of a sequence, [B, S, C], without those in front and behind."""
    return sequence[:, prefix : sequence.shape[1] - suffix] if prefix or suffix else sequence


def with_image_tokens(sequence: Tensor, prefix: int, suffix: int, tokens: Tensor) -> Tensor:
    """A sequence with other tokens for its image."""
    if not prefix and not suffix:
        return tokens
    return torch.cat([sequence[:, :prefix], tokens, sequence[:, sequence.shape[1] - suffix :]], dim=1)
