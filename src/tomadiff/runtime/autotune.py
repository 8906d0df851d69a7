"""Measure where merging gains, on the user's own device, model and size, and keep the answer on disk.

At the first call of a size, the model is run a few times on copies of its arguments, alternately dense and
merged. Sites of each kind and level are timed separately, and merge from then on only if that was faster.
These calls are not steps, and leave no trace: with an answer from the disk, the image is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tomadiff.config import ResolvedConfig
from tomadiff.core import RefreshSchedule
from tomadiff.errors import ConfigError

from .conflicts import cached
from .files import atomic_write, cache, one_at_a_time, parse_json
from .hook import SiteHook
from .layout import Layout
from .machine import processor, versions, wait_for
from .model_call import Group, ModelCall, SiteTask
from .plan_cache import PlanCache
from .timing import Times

if TYPE_CHECKING:
    from .session import Session

LEAST = 1.05  # the least speed-up that is worth a changed image and can be told from noise
ROUNDS = (3, 7)  # minimum and maximum number of rounds, each of one dense and one merged call
WARM_UP = 4  # calls before the first round
ENOUGH = 20.0  # seconds after which no round beyond the minimum is begun
NEVER = RefreshSchedule(10**9, 10**9)  # plans are not refreshed while merged calls are timed

log = logging.getLogger("tomadiff")
Situation = tuple[Any, ...]  # everything about a call that an answer depends on


@dataclass(frozen=True)
class Part:
    """The measurement of one group of sites."""

    kind: str
    level: int
    sites: int  # number of sites
    dense: float  # seconds per dense call
    merged: float  # seconds per merged call, including its share of the planning
    speedup: float  # median over the rounds
    merge: bool  # whether these sites should merge

    def __str__(self) -> str:
        does = "merged" if self.merge else "left dense"
        return f"{self.kind} at level {self.level} {does}, {self.speedup:.2f}x"


@dataclass(frozen=True)
class Answer:
    """Where to merge in one situation."""

    about: dict[str, Any]  # everything that the answer depends on
    parts: list[Part]
    call: float  # seconds of a dense call
    rounds: int
    took: float  # seconds of the whole measurement

    @property
    def off(self) -> frozenset[Group]:
        return frozenset((part.kind, part.level) for part in self.parts if not part.merge)

    @property
    def saving(self) -> float:
        """The share of a dense call that a merged one saves."""
        return sum(part.dense - part.merged for part in self.parts if part.merge) / self.call

    def __str__(self) -> str:
        tokens = " x ".join(map(str, self.about["tokens"]))
        sample = " and ".join(" x ".join(map(str, shape)) for shape in self.about["sample"])
        told = f"auto, {tokens} tokens, sample {sample}: " + "; ".join(map(str, self.parts)) + ". "
        if not any(part.merge for part in self.parts):
            told += "Nothing gains here, so all stays dense"
        else:
            told += f"A merged call saves {self.saving:.0%} of a dense one"
        on = f"{self.about['processor']}, {self.about['dtype']}"
        return f"{told} ({self.rounds} rounds in {self.took:.1f} s on {on})"


def decide(session: Session, arguments: dict[str, Any], layout: Layout, cut: bool) -> Answer:
    """Where to merge in this call of the model: a known answer, one from the disk, or one measured now.

    cut: every block is a span of its own.
    """
    shapes, precision, device = input_of(session, arguments)
    # a cache also cuts spans, but uses the answer that was measured without the cache
    told = cut and not cached(session.model)
    situation = (
        layout.grid(1),
        shapes,
        layout.reference_tokens,
        *precision,
        device,
        told,
        session.has_compiled_blocks,
    )
    if situation not in session.answers:
        about = _about(session, session.sites, session.config, layout, told, shapes, precision, device)
        record = Record(about, set(_groups(session)))
        session.answers[situation] = record.read() or _found_out(session, arguments, layout, cut, record)
    return session.answers[situation]


def record_of(
    session: Session, sites: list[SiteHook], config: ResolvedConfig, arguments: dict[str, Any], layout: Layout
) -> Record:
    """Where an answer about these sites under these settings is kept; each of them is its own span."""
    about = _about(session, sites, config, layout, False, *input_of(session, arguments))
    return Record(about, {group_of(hook) for hook in sites})


def group_of(hook: SiteHook) -> Group:
    return hook.site.kind, hook.bound.level


def input_of(
    session: Session, call: dict[str, Any]
) -> tuple[tuple[torch.Size, ...], list[torch.dtype], torch.device]:
    """Shapes, precisions and device of a call."""
    sample = _sample(session, call)
    device, precision = sample[0].device, [sample[0].dtype, session.model.dtype]
    if torch.is_autocast_enabled(device.type):
        precision.append(torch.get_autocast_dtype(device.type))
    return tuple(tensor.shape for tensor in sample), precision, device


def _sample(session: Session, call: dict[str, Any]) -> list[Tensor]:
    """The model's first argument with tokens or pixels: a batch, or a list of tensors."""
    for name in session.parameters:
        tensors = [leaf for leaf in tree_leaves(call.get(name)) if isinstance(leaf, Tensor)]
        if tensors and tensors[0].ndim > 1:
            return tensors
    raise ConfigError("auto can't tell the size of this call; give a ratio without auto")


def _about(
    session: Session,
    sites: list[SiteHook],
    config: ResolvedConfig,
    layout: Layout,
    cut: bool,
    shapes: tuple[torch.Size, ...],
    precision: list[torch.dtype],
    device: torch.device,
) -> dict[str, Any]:
    """Everything that an answer depends on, as JSON values."""
    model = session.model
    model_config = {name: value for name, value in dict(model.config).items() if not name.startswith("_")}
    attention = {
        f"{type(attention.processor).__name__} {getattr(attention.processor, '_attention_backend', None)}"
        for hook in sites
        for attention in hook.attentions
    }
    about = {
        "model": type(model).__name__,
        "model config": _digest(json.dumps(model_config, sort_keys=True, default=str)),
        "adapters": bool(getattr(model, "_hf_peft_config_loaded", False)),
        "attention": sorted(attention),
        "tokens": layout.grid(1),
        "sample": shapes,
        "others": layout.reference_tokens,
        "dtype": " / ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in precision)),
        "processor": processor(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "kernels": os.environ.get("TOMADIFF_KERNELS", "auto"),
        "cut": cut,
        "compiled": session.has_compiled_blocks,
        "settings": config.to_dict(),
        "versions": versions(),
    }
    return json.loads(json.dumps(about))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Record:
    """The file with the answer about one situation and these groups of sites."""

    def __init__(self, about: dict[str, Any], groups: set[Group]) -> None:
        self.about, self.groups = about, groups
        self.file = cache() / "auto" / f"{_digest(json.dumps(about))[:32]}.json"

    def read(self) -> Answer | None:
        """The answer on the disk, if it is valid and about the same situation."""
        try:
            content = parse_json(self.file.read_bytes())
            answer = Answer(**{**content, "parts": [Part(**part) for part in content["parts"]]})
        except (OSError, ValueError, TypeError, KeyError):
            return None
        groups = {(part.kind, part.level) for part in answer.parts}
        return answer if answer.about == self.about and groups == self.groups else None

    def keep(self, answer: Answer) -> Answer:
        """Save an answer; if several processes measure at once, the first one counts, and is returned."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(self.file.parent):
                answer = self.read() or answer
                content = json.dumps(asdict(answer), indent=1)
                atomic_write(self.file, lambda partial: partial.write_text(content))
        except OSError as error:
            log.warning("tomadiff: this could not be kept for the next time: %s", error)
        return answer


def _found_out(
    session: Session,
    arguments: dict[str, Any],
    layout: Layout,
    cut: bool,
    record: Record,
) -> Answer:
    """Measure, log it, and save the answer."""
    _check(session)
    calls = " to ".join(str(WARM_UP + 2 * rounds) for rounds in ROUNDS)
    log.warning("tomadiff measures where merging gains here, once, in %s calls of the model...", calls)
    answer = record.keep(measure(session, arguments, layout, cut, record.about))
    log.warning("tomadiff: %s", answer)
    return answer


def _check(session: Session) -> None:
    """Refuse to measure where extra calls are impossible, or their times meaningless."""
    later = "generate once at this size before it; what was found is kept"
    if torch.is_grad_enabled():
        raise ConfigError(
            "auto can't measure under autograd: call the model under torch.no_grad(), or give a ratio "
            "without auto, to train with merging everywhere"
        )
    if cached(session.model):
        raise ConfigError(f"auto can't measure beside a cache, which counts calls as steps: {later}")
    if session.compiled is not None:
        raise ConfigError(f"auto can't measure inside a model that compile() compiled as a whole: {later}")


def measure(
    session: Session, arguments: dict[str, Any], layout: Layout, cut: bool, about: dict[str, Any]
) -> Answer:
    """Time dense and merged calls alternately, and compare within rounds, since a machine's speed varies."""
    begin, groups = time.perf_counter(), _groups(session)
    trials = _Trials(session, arguments, layout, cut)
    with _timed(session, trials.times, cut) as watch:
        trials.dense(watch), trials.merged(watch)  # warm-up
        trials.dense(watch)
        trials.plans.clear()
        trials.times.synchronise = True  # to time the planning
        trials.merged(watch)
        trials.times.synchronise = False
        planning = {group: watch.plan[group] / session.config.steps_per_plan() for group in groups}
        rounds: list[tuple[dict[Group, float], dict[Group, float]]] = []
        calls: list[float] = []
        start = time.perf_counter()
        while len(rounds) < ROUNDS[0] or (len(rounds) < ROUNDS[1] and time.perf_counter() - start < ENOUGH):
            calls.append(trials.dense(watch))
            dense = dict(watch.seconds)
            trials.merged(watch)
            rounds.append((dense, {group: watch.seconds[group] + planning[group] for group in groups}))
    return Answer(
        about=about,
        parts=[compared(group, count, rounds) for group, count in groups.items()],
        call=statistics.median(calls),
        rounds=len(rounds),
        took=time.perf_counter() - begin,
    )


def compared(group: Group, count: int, rounds: list[tuple[dict[Group, float], dict[Group, float]]]) -> Part:
    """Dense and merged seconds of a group of sites, and whether it gains."""
    dense, merged = ([times[side][group] for times in rounds] for side in (0, 1))
    speedup = statistics.median(a / b for a, b in zip(dense, merged))
    return Part(*group, count, statistics.median(dense), statistics.median(merged), speedup, speedup >= LEAST)


def _groups(session: Session) -> Counter[Group]:
    """The groups that may merge, with their numbers of sites."""
    ratios = session.ratios
    return Counter(group_of(hook) for hook in session.sites if ratios.ever(*group_of(hook)))


class _Trials:
    """Dense and merged calls of the model that are not steps of a generation and leave no trace."""

    def __init__(self, session: Session, arguments: dict[str, Any], layout: Layout, cut: bool) -> None:
        self.session, self.arguments, self.layout = session, arguments, layout
        self.dense_tasks, self.merging_tasks = session.dense_tasks(), session.merging_tasks(layout, cut)
        self.plans, self.times = PlanCache(NEVER), Times()

    def dense(self, watch: _Watch) -> float:
        return self._seconds(self.dense_tasks, watch)

    def merged(self, watch: _Watch) -> float:
        return self._seconds(self.merging_tasks, watch)

    def _seconds(self, tasks: Sequence[SiteTask], watch: _Watch) -> float:
        # always the unshifted layout of regions, even if two alternate
        call = ModelCall(0, 0, False, self.layout, tasks, self.plans, self.times)
        arguments = copied(self.arguments)
        watch.clear()
        wait_for(watch.device)
        start = time.perf_counter()
        self.session.run(call, (), arguments)
        wait_for(watch.device)
        seconds = time.perf_counter() - start
        watch.read()
        return seconds


class _Watch:
    """The seconds that each group of sites takes in a call, and how many of them are planning, if known.

    On a GPU they are timed by events, so that the host runs ahead as it does in a generation. While planning
    is timed, and on other devices, the host waits for the device instead.
    """

    def __init__(self, times: Times) -> None:
        self.times, self.device = times, torch.device("cpu")
        self.seconds: defaultdict[Group, float] = defaultdict(float)
        self.plan: defaultdict[Group, float] = defaultdict(float)
        self._passed: list[tuple[Group, Any, Any]] = []  # spans that ran, with start and end marks

    def clear(self) -> None:
        self.seconds.clear()
        self.plan.clear()
        self._passed.clear()

    def start(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self.device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        self._start, self._planned = self._mark(), self.times.seconds["plan"]

    def stop(self, group: Group) -> None:
        self._passed.append((group, self._start, self._mark()))
        planning = self.times.seconds["plan"] - self._planned
        if not self._by_events():
            self.plan[group] += planning
            self.seconds[group] -= planning

    def read(self) -> None:
        """Sum up the times; call it when the device has finished."""
        for group, start, stop in self._passed:
            self.seconds[group] += (
                stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1000
            )

    def _by_events(self) -> bool:
        return self.device.type == "cuda" and not self.times.synchronise

    def _mark(self) -> Any:
        if not self._by_events():
            wait_for(self.device)
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


@contextlib.contextmanager
def _timed(session: Session, times: Times, cut: bool) -> Iterator[_Watch]:
    """Time spans from outside the hooks, so that everything that merging adds is included."""
    watch, handles = _Watch(times), []
    try:
        for hook in session.sites:
            module, group = hook.bound.module, group_of(hook)
            if cut or hook.index == hook.span.number:
                handles.append(module.register_forward_pre_hook(watch.start, with_kwargs=True))
            if cut or hook.index == hook.span.last:
                handles.append(module.register_forward_hook(lambda *_, group=group: watch.stop(group)))
        yield watch
    finally:
        for handle in handles:
            handle.remove()


def copied(arguments: Any) -> Any:
    """Copies of the arguments, since some models modify lists or tensors that they are given."""
    return tree_map_only(Tensor, Tensor.clone, arguments)
