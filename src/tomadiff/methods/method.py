"""What a method of token reduction is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tomadiff.core import MergePlan

MODULES = ("self", "cross", "mlp")  # the modules of a block that can be merged on their own

Grid = tuple[int, ...]


@dataclass(frozen=True)
class PlanSettings:
    """The settings that plans depend on, as `tomadiff.Config` explains them."""

    regions: str = "tile"
    region_size: int | tuple[int, ...] = 8
    assign: str = "region"
    scale: float = 1000.0
    unmerge: str = "transpose"


class PlanFunction(Protocol):
    def __call__(
        self,
        features: Tensor,
        grid: Grid,
        ratio: float,
        settings: PlanSettings,
        *,
        shifted: bool = False,
        depth: float = 0.0,
        destinations: Tensor | None = None,
    ) -> MergePlan:
        """A plan for features [B, N, C] of the image's tokens, which are on a grid.

        shifted: use the layout of every other step. depth: how far through the model the site is, from 0 to
        1. destinations: [B, K] to keep, where only the rest of the plan is to be made anew.
        """


class Requirement(NamedTuple):
    """A value that a setting must have, and why."""

    setting: str
    value: Any
    why: str


def any_ratio(ratio: float) -> None:
    """All of them can be had."""


def no_changes(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Defaults are the same with any other settings."""
    return {}


@dataclass(frozen=True)
class Method:
    """All that has to be known of a method. `defaults` has every setting that it can honour."""

    name: str
    plan: PlanFunction
    length: Callable[[Grid, float, PlanSettings], int]  # how many tokens plans keep, by grid and ratio
    defaults: Mapping[str, Any]
    # given all settings, the defaults that replace those above because of others
    dependent_defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] = no_changes
    requires: tuple[Requirement, ...] = ()
    check_ratio: Callable[[float], None] = any_ratio  # raises a ConfigError for those that can't be had
    from_block_input: bool = False  # plan once for each block, from its input, and not for each module
    keeps_destinations: bool = False  # weights can be made anew for the same destinations
