"""Which ways are points of one curve: those that differ only in a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tomadiff.tools.method_spec import parse, parts_of, spelled

from .job import Way

RATIO = "ratio"  # which is no setting of a way, but has a column of its own
Number = tuple[int, str]  # of a part of the way, and the setting in it; RATIO alone is that of the pair
Form = tuple[Any, ...]


def curves(ways: Sequence[Way]) -> dict[Way, str]:
    """The name of each way's curve, which is over the number that differs most, where several do."""
    forms: dict[Form, list[Way]] = {}
    for way in ways:
        forms.setdefault(_form(way), []).append(way)
    found: dict[Way, str] = {}
    for alike in forms.values():
        numbers = {way: _numbers(way) for way in alike}
        spread = {key: len({numbers[way][key] for way in alike}) for key in numbers[alike[0]]}
        over = max(spread, key=spread.__getitem__)
        for way in alike:
            found[way] = _name(way, over if spread[over] > 1 else None)
    return {way: found[way] for way in ways}


def _form(way: Way) -> Form:
    """All of a way but its numbers."""
    parts = [
        (name, *((key, None if _is_number(value) else str(value)) for key, value in settings.items()))
        for name, settings in map(parse, parts_of(way[0]))
    ]
    return (*parts, way[1] > 0)


def _numbers(way: Way) -> dict[Number, float]:
    """Ratio first: where it is all that differs, the curve has the way's own name."""
    found: dict[Number, float] = {(-1, RATIO): way[1]}
    for number, part in enumerate(parts_of(way[0])):
        found |= {(number, key): value for key, value in parse(part)[1].items() if _is_number(value)}
    return found


def _name(way: Way, over: Number | None) -> str:
    """The way with its number left out where the curve is over it."""
    parts = []
    for number, (name, settings) in enumerate(map(parse, parts_of(way[0]))):
        shown = {key: "..." if (number, key) == over else value for key, value in settings.items()}
        parts.append(spelled(name, shown))
    ratio = f" at {way[1]:g}" if way[1] and over != (-1, RATIO) else ""
    return "+".join(parts) + ratio


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
