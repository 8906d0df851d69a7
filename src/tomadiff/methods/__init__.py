"""Token reduction methods, one file each, which defines a `METHOD`."""

from . import ideal, todo, tofu, toma, tome
from .method import MODULES, Method, PlanSettings

METHODS: dict[str, Method] = {each.METHOD.name: each.METHOD for each in (toma, tome, tofu, todo, ideal)}

__all__ = ["METHODS", "MODULES", "Method", "PlanSettings"]
