"""Alternatives to tomadiff, by name: fewer steps, a better solver, caches, the real ToMeSD."""

from __future__ import annotations

from .cache_dit import DBCache
from .deepcache import DeepCache
from .diffusers_caches import FirstBlock, MagCache, TaylorSeer
from .fewer_steps import FewerSteps
from .rival import Rival, Settings
from .tomesd import ToMeSD

__all__ = ["RIVALS", "Rival", "Settings"]

RIVALS: dict[str, Rival] = {
    "tomesd": ToMeSD(),
    "steps": FewerSteps(),
    "first-block": FirstBlock(),
    "taylorseer": TaylorSeer(),
    "magcache": MagCache(),
    "deepcache": DeepCache(),
    "dbcache": DBCache(),
}
