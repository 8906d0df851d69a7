"""Per-token arguments, such as rotary tables and masks, for merged tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tomadiff.core import places_in_table, rows_at
from tomadiff.errors import UnsupportedModelError
from tomadiff.models import Call, PerTokenArg


def map_argument(inputs: Call, name: str, function: Callable[..., Any], *args: Any) -> None:
    """Replace an argument, "name" or "name.key" in a dict, by a function of it, if it was passed."""
    value: Any = inputs.get(name)
    if value is not None:
        inputs[name] = function(value, *args)
    elif "." in name:
        outer, _, inner = name.partition(".")
        value = inputs.get(outer)
        if value and value.get(inner) is not None:
            inputs[outer] = {**value, inner: function(value[inner], *args)}


def gather_rows(
    destinations: Tensor,
    tokens: int,
    rows: PerTokenArg,
    argument: Any,
    reference_tokens: tuple[int, int] = (0, 0),
    keys_only: bool = False,
    places: dict[tuple[int, int], Tensor] | None = None,
) -> Any:
    """A per-token argument for merged tokens; if only keys are merged, also for the unmerged queries.

    destinations: [B, K] of the image's `tokens`; `reference_tokens` come before and after these.
    places: keeps what `places_in_table` returns for these destinations.
    """
    how = (reference_tokens, keys_only, places)
    if not rows.inside:
        return _gather(destinations, tokens, rows, argument, *how)
    return tuple(
        _gather(destinations, tokens, rows, part, *how) if place in rows.inside else part
        for place, part in enumerate(argument)
    )


def _gather(
    destinations: Tensor,
    tokens: int,
    rows: PerTokenArg,
    table: Any,
    reference_tokens: tuple[int, int],
    keys_only: bool,
    places: dict[tuple[int, int], Tensor] | None,
) -> Any:
    if isinstance(table, (tuple, list)):
        how = (reference_tokens, keys_only, places)
        return tuple(_gather(destinations, tokens, rows, part, *how) for part in table)
    if not isinstance(table, Tensor) or rows.ndim not in (None, table.ndim):
        return table  # another form of the argument, or already gathered
    if table.shape[rows.axis] == 1:
        return table
    before, behind = reference_tokens if table.shape[rows.axis] > tokens else (0, 0)
    text = table.shape[rows.axis] - tokens - before - behind
    if text < 0:
        raise UnsupportedModelError(
            f"{rows.argument} of shape {list(table.shape)} has fewer entries than there are tokens, "
            f"{tokens}: these can't be merged with it"
        )
    start = before if rows.text_last else before + text
    key = (table.shape[rows.axis], start)
    at = None if places is None else places.get(key)  # no look-up in compiled code, whose lengths may vary
    if at is None:
        at = places_in_table(destinations, tokens, *key)
        if places is not None:
            places[key] = at
    merged: Tensor | PerSample
    if rows.axis == 0 and len(at) == 1:  # one table for all samples, which are one
        merged = table.index_select(0, at[0])
    else:
        gathered = rows_at(at, table, rows.axis)
        merged = PerSample(gathered) if rows.axis == 0 else gathered
    return PerLength(table, merged) if keys_only else merged


class PerSample:
    """A rotary table per sample, [B, S, ...], for code that expects one for all samples, [S, ...].

    Such code adds the batch axis itself, `table[None, :, None]`, or leaves it to broadcasting; here it is
    already present.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape

    def __getitem__(self, index: tuple) -> Tensor:
        without_batch = (slice(None), *index[1:])
        return self.rows[without_batch]

    def unsqueeze(self, axis: int) -> Tensor:
        return self.rows.unsqueeze(axis + 1)

    def to(self, device: torch.device) -> PerSample:
        return PerSample(self.rows.to(device))

    def view(self, *shape: int) -> Tensor:
        return self.rows.view(len(self.rows), *shape[1:])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple, kwargs: Any = None) -> Tensor:
        x, table = args  # a product with a tensor, which comes first
        return x * table.rows


class PerLength:
    """Rotary tables for unmerged queries and for merged keys: multiplication picks the one that fits."""

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
