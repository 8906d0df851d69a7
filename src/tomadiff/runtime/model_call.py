"""One call of a model that runs: what its sites do, and what they share. Dropping it is the reset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from .layout import Layout
from .plan_cache import KeptPlan, PlanCache
from .timing import Times


@dataclass(frozen=True)
class SiteTask:
    """What one site does in a call; the same in all calls of the same size and settings."""

    merged: bool = False  # it runs on merged tokens
    head: bool = False  # it merges them
    tail: bool = False  # it unmerges them
    ratio: float = 0.0
    tokens: int = 0  # of the image, at this site; 0 where nobody looked
    grid: tuple[int, ...] = ()  # of these tokens, as it is divided into regions
    kept: int = 0  # of these, how many a plan will keep: compiled code has to know before there is a plan
    kept_of_first_frame: int = 0  # where a model treats the first frame apart
    passes: bool = True  # nothing has to be done: all is dense, or tokens were merged before


DENSE = SiteTask()


class SpanState(NamedTuple):
    """The tokens of one span between its head and its tail."""

    sequence: Tensor  # with merged tokens
    original: Tensor  # the sequence before
    destinations: Tensor  # [B, K] token numbers
    key_bias: Tensor | None  # [B, K] to add to the logits of merged keys
    prefix: int  # tokens in front of the image's, which are never merged
    suffix: int  # and behind


@dataclass
class ModelCall:
    """Made by `Session.new_call`, or by whoever measures; sites find it as `session.call` while it runs."""

    step: int
    number: int  # which call of the step
    shifted: bool  # regions are shifted in this step
    layout: Layout
    tasks: Sequence[SiteTask]  # of all sites
    plans: PlanCache
    times: Times
    # spans between head and tail, by number; at the end of a call, none is left
    spans: dict[int, SpanState] = field(default_factory=dict)
    span_plans: dict[int, KeptPlan] = field(default_factory=dict)  # which compiled code does not see
    span_lengths: dict[int, tuple[int, int]] = field(default_factory=dict)  # tokens before and after merging
    visits: Counter[int] = field(default_factory=Counter)  # merges by site: a block may run on half batches
    block_input: Tensor | None = None  # of the block under way, for methods that plan from it
    # arguments, and their rows for merged tokens, by the identities of destinations, argument and declaration
    gathered: dict[tuple[int, int, int], tuple[Any, Any]] = field(default_factory=dict)
