"""What a method of token reduction is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tomadiff.core import MergePlan

MODULES = ("self", "cross", "mlp")  # the modules of a block that can be merged on their own
# the settings that a method must have defaults for; those in PlanSettings are up to it
REQUIRED = ("ratio", "where", "modules", "refresh_destinations", "refresh_weights", "share", "dense_blocks")

Grid = tuple[int, ...]


@dataclass(frozen=True)
class PlanSettings:
    """The settings that plans depend on, as `tomadiff.Config` explains them."""

    regions: str = "tile"
    region_size: int | tuple[int, ...] = 8
    assign: str = "region"
    scale: float = 1000.0
    unmerge: str = "transpose"
    # Both layouts are used in turns. They are made with the first plan, since later the host would have to
    # wait for their copy to the device.
    shift: bool = False


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
    """Accept every ratio."""


def no_changes(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keep all defaults, whatever the other settings are."""
    return {}


@dataclass(frozen=True)
class Method:
    """Everything that the rest of the package needs to know about a method."""

    name: str
    plan: PlanFunction
    length: Callable[[Grid, float, PlanSettings], int]  # number of merged tokens, by grid and ratio
    defaults: Mapping[str, Any]  # every setting that the method has; others are refused
    # dependent_defaults(settings): the defaults that differ because of other settings, for example because
    # of regions="global"; `settings` has a value for each, asked for or by default
    dependent_defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] = no_changes
    requires: tuple[Requirement, ...] = ()
    check_ratio: Callable[[float], None] = any_ratio  # raises a ConfigError for a ratio that it can't do
    from_block_input: bool = False  # one plan per block, made from the block's input, not one per module
    keeps_destinations: bool = False  # can recompute weights for given destinations

    def __post_init__(self) -> None:
        missing = [name for name in REQUIRED if name not in self.defaults]
        if missing:
            raise TypeError(f"method {self.name!r} has no default for {', '.join(missing)}")
