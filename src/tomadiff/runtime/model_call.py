"""One call of a model: what its sites do, and the state they share. Dropping the object resets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from .layout import Layout
from .plan_cache import KeptPlan, PlanCache
from .timing import Times

Group = tuple[str, int]  # all sites of this kind at this level


@dataclass(frozen=True, slots=True)
class SiteTask:
    """What one site does in a call; the same in all calls of the same size and settings."""

    merged: bool = False  # the site runs on merged tokens
    head: bool = False  # the site merges: it is the first of its span
    tail: bool = False  # the site unmerges: it is the last of its span
    ratio: float = 0.0
    tokens: int = 0  # number of image tokens at this site; 0 if unknown
    grid: tuple[int, ...] = ()  # the grid that is divided into regions
    kept: int = 0  # number of merged tokens; compiled code needs it before there is a plan
    kept_of_first_frame: int = 0  # merged tokens of the first frame, for models that modulate it differently
    passes: bool = True  # the hook only calls the module: the call is dense, or tokens are merged already


DENSE = SiteTask()


class SpanState(NamedTuple):
    """The tokens of one span between its head and its tail."""

    sequence: Tensor  # the sequence with merged image tokens
    original: Tensor  # the sequence before merging
    destinations: Tensor  # [B, K] token numbers
    key_bias: Tensor | None  # [B, K] bias to add to the logits of merged keys
    prefix: int  # number of tokens before the image's, which are never merged
    suffix: int  # number of tokens after the image's, which are never merged


@dataclass(slots=True)
class ModelCall:
    """The state of one call, made by the session or by measuring code; sites find it as `session.call`."""

    step: int
    number: int  # number of this call within its step
    shifted: bool  # regions are shifted in this step
    layout: Layout
    tasks: Sequence[SiteTask]  # one for each site
    plans: PlanCache
    times: Times
    # spans that are between head and tail, by number; empty at the end of a call
    spans: dict[int, SpanState] = field(default_factory=dict)
    span_plans: dict[int, KeptPlan] = field(default_factory=dict)  # by span; compiled code does not see them
    span_lengths: dict[int, tuple[int, int]] = field(default_factory=dict)  # tokens before and after merging
    # number of merges by site: a block may run several times per call, on parts of the batch
    visits: dict[int, int] = field(default_factory=dict)
    ran: list[bool] = field(init=False)  # for each site, whether it has run
    block_input: Tensor | None = None  # input of the block that is running, for methods that plan from it
    # arguments and their rows for merged tokens, by the ids of destinations, argument and declaration
    gathered: dict[tuple[int, int, int], tuple[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ran = [False] * len(self.tasks)
