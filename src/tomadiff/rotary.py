"""Rotary tables for merged tokens, where a model's code expects one table for all samples."""

from __future__ import annotations

import torch
from torch import Tensor


class PerSample:
    """A rotary table for each sample, [B, S, D], for code that expects one for all, [S, D].

    Such code adds the batch axis itself, `table[None, :, None]`; here, that axis is there already.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __getitem__(self, index: tuple) -> Tensor:
        return self.rows[(slice(None), *index[1:])]


class PerLength:
    """Rotary rows for whole queries and for merged keys in one table: multiplying takes those that fit."""

    def __init__(self, *tables: Tensor | PerSample) -> None:
        self.tables = tables

    def __getitem__(self, index: tuple) -> PerLength:
        return PerLength(*(table[index] for table in self.tables))

    def to(self, device: torch.device) -> PerLength:
        return PerLength(*(table.to(device) for table in self.tables))

    def __rmul__(self, x: Tensor) -> Tensor:
        return x * next(table for table in self.tables if table.shape[1] == x.shape[1])
