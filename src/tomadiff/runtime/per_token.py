"""What belongs to single tokens, for merged ones: rotary tables, masks and the like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tomadiff.core import destination_rows
from tomadiff.errors import UnsupportedModelError
from tomadiff.models import Call, PerTokenArg


def alter(call: Call, name: str, by: Callable[[Any], Any]) -> None:
    """Change an argument, "name" or "name.key" of a dict of them, where it is there."""
    outer, _, inner = name.partition(".")
    value = call.get(outer)
    if inner and (value or {}).get(inner) is not None:
        call[outer] = {**value, inner: by(value[inner])}
    elif not inner and value is not None:
        call[outer] = by(value)


def follow(
    destinations: Tensor,
    tokens: int,
    rows: PerTokenArg,
    argument: Any,
    others: tuple[int, int] = (0, 0),
    keys_only: bool = False,
) -> Any:
    """An argument with entries for merged tokens; for whole queries too, where only keys are merged.

    destinations: [B, K], of so many tokens; `others` are those of other pictures, before and behind.
    """
    how = (others, keys_only)
    if not rows.inside:
        return _followed(destinations, tokens, rows, argument, *how)
    return tuple(
        _followed(destinations, tokens, rows, part, *how) if place in rows.inside else part
        for place, part in enumerate(argument)
    )


def _followed(
    destinations: Tensor, tokens: int, rows: PerTokenArg, table: Any, others: tuple[int, int], keys_only: bool
) -> Any:
    if isinstance(table, (tuple, list)):
        return tuple(_followed(destinations, tokens, rows, part, others, keys_only) for part in table)
    if not isinstance(table, Tensor) or rows.ndim not in (None, table.ndim):
        return table  # of another shape, or it has followed already
    if table.shape[rows.axis] == 1:
        return table
    before, behind = others if table.shape[rows.axis] > tokens else (0, 0)
    text = table.shape[rows.axis] - tokens - before - behind
    if text < 0:
        raise UnsupportedModelError(
            f"{rows.argument} of shape {list(table.shape)} has fewer entries than there are tokens, "
            f"{tokens}: these can't be merged with it"
        )
    merged: Tensor | PerSample = destination_rows(
        destinations, tokens, table, rows.axis, before if rows.text_last else before + text
    )
    if rows.axis == 0:
        merged = merged[0] if len(merged) == 1 else PerSample(merged)
    return PerLength(table, merged) if keys_only else merged


class PerSample:
    """A rotary table for each sample, [B, S, ...], for code that expects one for all, [S, ...].

    Such code adds the batch axis itself, `table[None, :, None]`, or leaves it to broadcasting; here, that
    axis is there already.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape

    def __getitem__(self, index: tuple) -> Tensor:
        return self.rows[(slice(None), *index[1:])]

    def unsqueeze(self, axis: int) -> Tensor:
        return self.rows.unsqueeze(axis + 1)

    def view(self, *shape: int) -> Tensor:
        return self.rows.view(len(self.rows), *shape[1:])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple, kwargs: Any = None) -> Tensor:
        x, table = args  # a product with a tensor, which comes first
        return x * table.rows


class PerLength:
    """Rotary rows for whole queries and for merged keys in one table: multiplying takes those that fit."""

    def __init__(self, *tables: Tensor | PerSample) -> None:
        self.tables = tables

    def __getitem__(self, index: tuple) -> PerLength:
        return PerLength(*(table[index] for table in self.tables))

    def unsqueeze(self, axis: int) -> PerLength:
        return PerLength(*(table.unsqueeze(axis) for table in self.tables))

    def to(self, device: torch.device) -> PerLength:
        return PerLength(*(table.to(device) for table in self.tables))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple, kwargs: Any = None) -> Tensor:
        x, several = args  # a product with a tensor, which comes first
        return x * next(table for table in several.tables if _fits(table.shape, x.shape))


def _fits(table: torch.Size, x: torch.Size) -> bool:
    return all(a in (1, b) for a, b in zip(reversed(table), reversed(x)))
