"""All that a way comes to, so that pictures drawn with other defaults or versions are never mixed."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from tomadiff.models import Family
from tomadiff.tools.method_spec import CACHES, DENSE, TOMESD, TOMESD_SETTINGS, configuration, parse


def resolved(way: str, ratio: float, family: Family) -> dict[str, dict[str, Any]]:
    """The settings of each part of a way, as JSON will have them, also those that nobody gave."""
    found = {part: _part(part, ratio, family) for part in way.split("+")}
    return json.loads(json.dumps(found, default=str))


def _part(part: str, ratio: float, family: Family) -> dict[str, Any]:
    name, settings = parse(part)
    if name == DENSE:
        return {}
    if name == TOMESD:
        import tomesd

        known = inspect.signature(tomesd.apply_patch).parameters.values()
        defaults = {p.name: p.default for p in known if p.default is not p.empty}
        return {"version": version("tomesd"), **defaults, "ratio": ratio, **TOMESD_SETTINGS, **settings}
    if name in CACHES:
        return asdict(CACHES[name](**settings))
    return configuration(part, ratio, family).to_dict()
