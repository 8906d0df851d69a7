"""Split sequences into image tokens, which are merged, and others, which never are."""

from __future__ import annotations

import torch
from torch import Tensor


def image_tokens(sequence: Tensor, prefix: int, suffix: int) -> Tensor:
    """The image tokens of a sequence, [B, S, C], without the tokens before and after them."""
    return sequence[:, prefix : sequence.shape[1] - suffix] if prefix or suffix else sequence


def with_image_tokens(sequence: Tensor, prefix: int, suffix: int, tokens: Tensor) -> Tensor:
    """The sequence with its image tokens replaced."""
    if not prefix and not suffix:
        return tokens
    return torch.cat([sequence[:, :prefix], tokens, sequence[:, sequence.shape[1] - suffix :]], dim=1)
