"""Group contenders that differ only in a number into curves, for plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tomadiff.tools.method_spec import parse, parts_of, spelled

from .job import Contender

RATIO = "ratio"  # not among the settings of a method: a contender has it apart
Number = tuple[int, str]  # the index of a part and a setting in it; (-1, RATIO) for the ratio
Form = tuple[Any, ...]


def curves(contenders: Sequence[Contender]) -> dict[Contender, str]:
    """The name of each contender's curve; of several numbers, it is over the one that varies most."""
    forms: dict[Form, list[Contender]] = {}
    for contender in contenders:
        forms.setdefault(_form(contender), []).append(contender)
    found: dict[Contender, str] = {}
    for alike in forms.values():
        numbers = {contender: _numbers(contender) for contender in alike}
        spread = {key: len({numbers[contender][key] for contender in alike}) for key in numbers[alike[0]]}
        over = max(spread, key=spread.__getitem__)
        for contender in alike:
            found[contender] = _name(contender, over if spread[over] > 1 else None)
    return {contender: found[contender] for contender in contenders}


def _form(contender: Contender) -> Form:
    """A contender without its numbers."""
    parts = [
        (name, *((key, None if _is_number(value) else str(value)) for key, value in settings.items()))
        for name, settings in map(parse, parts_of(contender[0]))
    ]
    return (*parts, contender[1] > 0)


def _numbers(contender: Contender) -> dict[Number, float]:
    """The numbers of a contender, the ratio first: a curve over the ratio has the method's own name."""
    found: dict[Number, float] = {(-1, RATIO): contender[1]}
    for number, part in enumerate(parts_of(contender[0])):
        found |= {(number, key): value for key, value in parse(part)[1].items() if _is_number(value)}
    return found


def _name(contender: Contender, over: Number | None) -> str:
    """A contender, with dots for the number that the curve is over."""
    parts = []
    for number, (name, settings) in enumerate(map(parse, parts_of(contender[0]))):
        shown = {key: "..." if (number, key) == over else value for key, value in settings.items()}
        parts.append(spelled(name, shown))
    ratio = f" at {contender[1]:g}" if contender[1] and over != (-1, RATIO) else ""
    return "+".join(parts) + ratio


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
