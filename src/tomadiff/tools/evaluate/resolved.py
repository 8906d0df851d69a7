"""The full settings of a method, so that pictures drawn with other defaults are never mixed."""

from __future__ import annotations

import json
from typing import Any

from tomadiff.models import Family
from tomadiff.tools.method_spec import DENSE, configuration, parse, parts_of, rival_settings
from tomadiff.tools.rivals import RIVALS


def resolved(method: str, ratio: float, family: Family | None) -> dict[str, dict[str, Any]]:
    """The settings of each part of a method as JSON, defaults included."""
    found = {part: _part(part, ratio, family) for part in parts_of(method)}
    return json.loads(json.dumps(found, default=str))


def _part(part: str, ratio: float, family: Family | None) -> dict[str, Any]:
    name, _ = parse(part)
    if name == DENSE:
        return {}
    if name in RIVALS:
        return RIVALS[name].resolved(rival_settings(part, ratio))
    return configuration(part, ratio, family).resolve(family).to_dict()
