"""Where merging gains: measured on the user's own device, model and size, once, and kept on disk.

At the first call of a size, the model is run a few times on copies of its arguments, dense and merged in
turns. Sites of a kind and level are timed apart, and merge from then on only if they were faster for it.
These calls are no steps, and leave no trace: with an answer from the disk, the picture is the same.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tomadiff.core import RefreshSchedule
from tomadiff.errors import ConfigError

from .conflicts import cached
from .files import atomic_write, cache, one_at_a_time, parse_json
from .hook import SiteHook
from .layout import Layout
from .machine import processor, versions, wait_for
from .model_call import ModelCall, SiteTask
from .plan_cache import PlanCache
from .timing import Times

if TYPE_CHECKING:
    from .session import Session

LEAST = 1.05  # a speed-up of sites that is worth a changed picture, and can be told from noise
ROUNDS = (3, 7)  # at least and at most, of a dense and a merged call
WARM_UP = 4  # calls before these
ENOUGH = 20.0  # seconds, after which no more rounds than the least are begun
NEVER = RefreshSchedule(10**9, 10**9)  # while merged calls are timed, plans are not made anew

log = logging.getLogger("tomadiff")
Group = tuple[str, int]  # sites of a kind, at a level
Situation = tuple[Any, ...]  # what may change from call to call, and decides


@dataclass(frozen=True)
class Part:
    """What was measured of a group of sites: seconds in a call, with its share of the planning if merged."""

    kind: str
    level: int
    sites: int
    dense: float
    merged: float
    speedup: float  # median of what it was in each round
    merge: bool  # is it worth it?

    def __str__(self) -> str:
        does = "merged" if self.merge else "left dense"
        return f"{self.kind} at level {self.level} {does}, {self.speedup:.2f}x"


@dataclass(frozen=True)
class Answer:
    """Where to merge in one situation."""

    about: dict[str, Any]  # all that it depends on
    parts: list[Part]
    call: float  # seconds of a dense one
    rounds: int
    took: float  # seconds

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
    """Where to merge in this call of the model: as known, as on the disk, or as measured now.

    cut: every block is a span of its own.
    """
    sample = _sample(session, arguments)
    shapes, device = tuple(tensor.shape for tensor in sample), sample[0].device
    precision = [sample[0].dtype, session.model.dtype]
    if torch.is_autocast_enabled(device.type):
        precision.append(torch.get_autocast_dtype(device.type))
    # a cache cuts spans too, but takes the answer from without it
    told = cut and not cached(session.model)
    situation = (
        layout.grid(1),
        shapes,
        layout.reference_tokens,
        *precision,
        device,
        told,
        _compiled(session),
    )
    if situation not in session.answers:
        about = _about(session, layout, told, shapes, precision, device)
        file = cache() / "auto" / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]}.json"
        known = _read(file, about, session)
        session.answers[situation] = known or _found_out(session, arguments, layout, cut, about, file)
    return session.answers[situation]


def group_of(hook: SiteHook) -> Group:
    return hook.site.kind, hook.bound.level


def _compiled(session: Session) -> bool:
    """Whether blocks are, one by one."""
    return any(hook.compiler.settings is not None for hook in session.sites)


def _sample(session: Session, call: dict[str, Any]) -> list[Tensor]:
    """The first argument with tokens or pixels in it, in a batch or as a list."""
    for name in session.parameters:
        tensors = [leaf for leaf in tree_leaves(call.get(name)) if isinstance(leaf, Tensor)]
        if tensors and tensors[0].ndim > 1:
            return tensors
    raise ConfigError("auto can't tell the size of this call; give a ratio without auto")


def _about(
    session: Session,
    layout: Layout,
    cut: bool,
    shapes: tuple[torch.Size, ...],
    precision: list[torch.dtype],
    device: torch.device,
) -> dict[str, Any]:
    """All that an answer depends on, as JSON has it."""
    model = session.model
    config = {name: value for name, value in dict(model.config).items() if not name.startswith("_")}
    attention = {
        f"{type(attention.processor).__name__} {getattr(attention.processor, '_attention_backend', None)}"
        for hook in session.sites
        for attention in hook.attentions
    }
    about = {
        "model": type(model).__name__,
        "model config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
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
        "compiled": _compiled(session),
        "settings": session.config.asked(),
        "versions": versions(),
    }
    return json.loads(json.dumps(about))


def _read(file: Path, about: dict[str, Any], session: Session) -> Answer | None:
    """What is on the disk, if it is whole and about the same."""
    try:
        content = parse_json(file.read_bytes())
        answer = Answer(**{**content, "parts": [Part(**part) for part in content["parts"]]})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    groups = {(part.kind, part.level) for part in answer.parts}
    return answer if answer.about == about and groups == set(_groups(session)) else None


def _found_out(
    session: Session,
    arguments: dict[str, Any],
    layout: Layout,
    cut: bool,
    about: dict[str, Any],
    file: Path,
) -> Answer:
    """Measure, say so, and keep the answer."""
    _check(session)
    calls = " to ".join(str(WARM_UP + 2 * rounds) for rounds in ROUNDS)
    log.warning("tomadiff measures where merging gains here, once, in %s calls of the model...", calls)
    answer = measure(session, arguments, layout, cut, about)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(file.parent):  # of several that measure at once, the first one's answer holds
            answer = _read(file, about, session) or answer
            atomic_write(file, lambda partial: partial.write_text(json.dumps(asdict(answer), indent=1)))
    except OSError as error:
        log.warning("tomadiff: this could not be kept for the next time: %s", error)
    log.warning("tomadiff: %s", answer)
    return answer


def _check(session: Session) -> None:
    """Some things make calls that are no steps impossible, or their times meaningless."""
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
    """Time dense and merged calls in turns, and compare neighbours only: machines change their pace."""
    begin, groups = time.perf_counter(), _groups(session)
    trials = _Trials(session, arguments, layout, cut)
    with _timed(session, trials.times, cut) as watch:
        trials.dense(watch), trials.merged(watch)  # whoever goes first pays for warming up
        trials.dense(watch)
        trials.plans.clear()
        trials.times.synchronise = True  # to know what planning takes
        trials.merged(watch)
        trials.times.synchronise = False
        planning = {group: watch.plan[group] / _keeps_plans_for(session) for group in groups}
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
        parts=[_part(group, count, rounds) for group, count in groups.items()],
        call=statistics.median(calls),
        rounds=len(rounds),
        took=time.perf_counter() - begin,
    )


def _part(group: Group, count: int, rounds: list[tuple[dict[Group, float], dict[Group, float]]]) -> Part:
    dense, merged = ([times[side][group] for times in rounds] for side in (0, 1))
    speedup = statistics.median(a / b for a, b in zip(dense, merged))
    return Part(*group, count, statistics.median(dense), statistics.median(merged), speedup, speedup >= LEAST)


def _groups(session: Session) -> Counter[Group]:
    """Those that may merge, and how many sites are in them."""
    ratios = session.ratios
    return Counter(group_of(hook) for hook in session.sites if ratios.ever(*group_of(hook)))


def _keeps_plans_for(session: Session) -> float:
    """Steps for each plan that is made; with two layouts in turns, there are twice as many plans."""
    return session.config.refresh_schedule().weights / (1 + session.config.shift)


class _Trials:
    """Calls of the model, dense and merged, that are no steps of a generation and leave no trace."""

    def __init__(self, session: Session, arguments: dict[str, Any], layout: Layout, cut: bool) -> None:
        self.session, self.arguments, self.layout = session, arguments, layout
        self.dense_tasks, self.merging_tasks = session.dense_tasks(), session.merging_tasks(layout, cut)
        self.plans, self.times = PlanCache(NEVER), Times()

    def dense(self, watch: _Watch) -> float:
        return self._seconds(self.dense_tasks, watch)

    def merged(self, watch: _Watch) -> float:
        return self._seconds(self.merging_tasks, watch)

    def _seconds(self, tasks: Sequence[SiteTask], watch: _Watch) -> float:
        # always the same layout of regions, where two take turns
        call = ModelCall(0, 0, False, self.layout, tasks, self.plans, self.times)
        arguments = _copied(self.arguments)
        watch.clear()
        wait_for(watch.device)
        start = time.perf_counter()
        self.session.run(call, (), arguments)
        wait_for(watch.device)
        seconds = time.perf_counter() - start
        watch.read()
        return seconds


class _Watch:
    """Seconds that groups of sites take in a call, and of these, those for planning if they are known.

    On a GPU events tell, so that the host runs ahead as it does in a generation. Where planning is timed, and
    on other devices, the host waits.
    """

    def __init__(self, times: Times) -> None:
        self.times, self.device = times, torch.device("cpu")
        self.seconds: defaultdict[Group, float] = defaultdict(float)
        self.plan: defaultdict[Group, float] = defaultdict(float)
        self._passed: list[tuple[Group, Any, Any]] = []  # with the marks at both ends

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
        """When the device has done all of the call."""
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
    """From outside, span by span: all that merging adds is in it."""
    watch, handles = _Watch(times), []
    try:
        for hook in session.sites:
            module, group = hook.bound.module, group_of(hook)
            if cut or hook is hook.span.sites[0]:
                handles.append(module.register_forward_pre_hook(watch.start, with_kwargs=True))
            if cut or hook is hook.span.sites[-1]:
                handles.append(module.register_forward_hook(lambda *_, group=group: watch.stop(group)))
        yield watch
    finally:
        for handle in handles:
            handle.remove()


def _copied(arguments: Any) -> Any:
    """Some models take lists apart, or write into what they are given."""
    return tree_map_only(Tensor, Tensor.clone, arguments)
