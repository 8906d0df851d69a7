"""Methods by name, as the benchmark and the evaluation take them on the command line.

A method is `dense`; `auto` (what `tomadiff.apply(pipe)` chooses); `tomadiff`, a preset or another method of
this package; or a rival: fewer steps, a cache, the real ToMeSD. Settings follow a colon, and a plus combines
methods: `tomadiff:interval=3`, `steps:13,solver=dpm++`, `first-block:threshold=0.1+tomadiff`. The name of a
settings file (`fast.json`) is replaced by its content, so that results stay comparable when it changes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

import tomadiff
from tomadiff import methods
from tomadiff.config import PRESETS, Config, make
from tomadiff.errors import ConfigError
from tomadiff.models import Family
from tomadiff.settings_file import load as load_settings
from tomadiff.settings_file import warn_of_another

from .arguments.names import AUTO, DENSE, OURS
from .rivals import RIVALS, Settings

# our default settings, then the paper's variants and the other methods as published
METHODS = (
    "ideal",
    OURS,
    *PRESETS,
    *(name for name in methods.METHODS if name not in ("toma", "ideal")),
)
USUAL = (DENSE, *METHODS, "tomesd")  # compared by default in a benchmark of single calls
NAMES = (DENSE, AUTO, *METHODS, *RIVALS)
SHORTHANDS = {"steps": "count"}  # the setting that a bare value means: steps:13 is steps:count=13


def label(method: str, ratio: float) -> str:
    return f"{method} at {ratio:g}" if ratio else method


def configuration(method: str, ratio: float, family: Family | None) -> Config:
    """The configuration of a method of this package; raises if models of this family can't honour it."""
    config = make(None, asked(method, ratio))
    config.resolve(family)
    return config


def asked(method: str, ratio: float) -> Settings:
    """The settings to give to `tomadiff.apply` for a method of this package."""
    name, settings = parse(method)
    if name == AUTO:
        return settings
    if name not in METHODS:
        raise ConfigError(
            f"unknown method {method!r}; there are {', '.join(NAMES)}, and {OURS}:setting=value,..."
        )
    if name in PRESETS:
        settings = {"preset": name, **settings}
    elif name in methods.METHODS:
        settings = {"method": name, **settings}
    return {"ratio": ratio, **settings} if ratio or merges(method) else settings


def written(config: Config) -> str:
    """A configuration as a method: the inverse of `configuration`."""
    settings, resolved = config.asked(), config.resolve()
    if not settings:
        return AUTO
    if not resolved.merges_as_fallback:  # a method that says no ratio is measured at those of the command
        settings = {"ratio": resolved.ratio, **settings}
    name = settings.pop("preset", None) or settings.pop("method", OURS)
    return spelled(name, settings)


def spelled(name: str, settings: dict[str, Any]) -> str:
    """The inverse of `parse`."""
    texts = {key: value if isinstance(value, str) else repr(value) for key, value in settings.items()}
    bare = [texts.pop(SHORTHANDS[name])] if SHORTHANDS.get(name) in texts else []
    fields = bare + [f"{key}={text}" for key, text in texts.items()]
    return f"{name}:{','.join(fields)}" if fields else name


def usual(ratios: Sequence[float], family: Family) -> list[str]:
    """All methods that a family of models allows at one of these ratios, and that are installed."""
    possible = []
    for name in USUAL:
        try:
            pairs([name], ratios, family)
            possible.append(name)
        except (ConfigError, ImportError):
            continue
    return possible


def pairs(
    methods: Sequence[str], ratios: Sequence[float], family: Family | None
) -> tuple[list[tuple[str, float]], list[str]]:
    """Each method at each ratio that it can do, or at the ratio in its settings; at 0 if it doesn't merge.

    Also returns what was left out, and why.
    """
    found, left_out = [], []
    for method, own in dict.fromkeys(map(_expanded, methods)):
        parts = parts_of(method)
        if sum(map(merges, parts)) > 1:
            raise ConfigError(f"{method!r} merges twice: combine one merging method with caches")
        if own is not None or not any(map(merges, parts)):
            for part in parts:
                check(part, own or 0.0, family)
            found.append((method, own or 0.0))
            continue
        possible = []
        for ratio in dict.fromkeys(ratios):
            try:
                for part in parts:
                    check(part, ratio, family)
                possible.append((method, ratio))
            except ConfigError as error:
                reason = error
                left_out.append(f"{label(method, ratio)} is left out: {error}")
        if not possible:
            raise reason
        found += possible
    # a method may be asked for twice, by --ratio and with a ratio of its own
    return sorted(dict.fromkeys(found), key=lambda pair: pair[1]), left_out


def check(part: str, ratio: float, family: Family | None) -> None:
    """Raise if a method does not work with a family of models."""
    name, settings = parse(part)
    if name == DENSE:
        if settings:
            raise ConfigError(f"{part!r}: {DENSE} has no settings; leave them out")
    elif name in RIVALS:
        RIVALS[name].check(part, rival_settings(part, ratio), family)
    else:
        if name == AUTO and settings:
            raise ConfigError(f"{part!r}: {AUTO} chooses the settings; to give some, take {OURS}")
        configuration(part, ratio, family)


def check_fit(target: Any, contenders: Sequence[tuple[str, float]]) -> None:
    """Raise if this very model or pipeline can't honour a method."""
    for method, ratio in contenders:
        # rivals count the steps of a pipeline, which a model alone has none of
        if isinstance(target, nn.Module) and not all(map(is_per_step, parts_of(method))):
            continue
        with switched_on(target, method, ratio):
            pass


@contextmanager
def switched_on(target: Any, method: str, ratio: float) -> Iterator[None]:
    """Put a method on a pipeline or a model for the length of a `with` block."""
    with ExitStack() as stack:
        # merging goes on first, so that caches are outside of it and store unmerged tokens
        for part in sorted(parts_of(method), key=lambda part: _is_inner(part, ratio), reverse=True):
            stack.enter_context(_part_on(target, part, ratio))
        yield


def _is_inner(part: str, ratio: float) -> bool:
    return merges(part) or (ratio > 0 and parse(part)[0] == OURS)


@contextmanager
def _part_on(target: Any, part: str, ratio: float) -> Iterator[None]:
    name, _ = parse(part)
    if name == DENSE:
        yield
    elif name in RIVALS:
        with RIVALS[name].on(target, rival_settings(part, ratio)):
            yield
    else:
        with tomadiff.merged(target, **asked(part, ratio)):
            yield


def calibrate(target: Any, method: str, draw: Callable[[], Any]) -> None:
    """Calibrate the parts of a method that need it, on a dense picture."""
    for part in parts_of(method):
        name, settings = parse(part)
        if name in RIVALS:
            RIVALS[name].calibrate(target, settings, draw)


def rival_settings(part: str, ratio: float) -> Settings:
    """The settings of a rival, with the ratio if it merges."""
    name, settings = parse(part)
    return {"ratio": ratio, **settings} if RIVALS[name].merges else settings


def steps_of(method: str) -> int | None:
    """The number of steps that a method sets, if it does."""
    counts = (parse(part)[1]["count"] for part in parts_of(method) if parse(part)[0] == "steps")
    return next(counts, None)


def lists_steps(method: str) -> bool:
    """Whether a method lists the steps that run, and so fits one number of steps only."""
    return any(isinstance(parse(part)[1].get("interval"), (list, tuple)) for part in parts_of(method))


def decides(method: str) -> bool:
    """Whether the work depends on the data, so that it differs from picture to picture."""
    return any(name in RIVALS and RIVALS[name].decides for name, _ in map(parse, parts_of(method)))


def is_per_step(part: str) -> bool:
    """Whether a single call of the model shows what a method does; others need whole generations."""
    name, settings = parse(part)
    if name in RIVALS:
        return RIVALS[name].per_step
    return name != AUTO and settings.get("interval", 1) == 1


def merges(part: str) -> bool:
    """Whether a part takes a ratio; with an interval alone, nothing is merged."""
    name, settings = parse(part)
    if name in RIVALS:
        return RIVALS[name].merges
    forecasts = name == OURS and settings.get("interval", 1) != 1 and "ratio" not in settings
    return name not in (DENSE, AUTO) and not forecasts


def parts_of(method: str) -> list[str]:
    """Split at each plus, except one that ends a solver's name: `steps:13,solver=dpm++`."""
    return re.split(r"\+(?=[^+\d,])", method)


def parse(part: str) -> tuple[str, Settings]:
    """A name and the settings after its colon, written like keyword arguments; words need no quotes."""
    name, _, fields = part.partition(":")
    try:
        call = ast.parse(f"f({_quoted(fields)})", mode="eval").body
        assert isinstance(call, ast.Call) and len(call.args) <= (name in SHORTHANDS)
        found = [(SHORTHANDS[name], ast.literal_eval(value)) for value in call.args]
        found += [(keyword.arg or "", _value(keyword.value)) for keyword in call.keywords]
        assert len(dict(found)) == len(found)
        return name, dict(found)
    except (SyntaxError, ValueError, AssertionError):
        raise ConfigError(f"can't read {part!r}: write name:setting=value,setting=value, each once") from None


def _quoted(fields: str) -> str:
    """Quote words that are no Python names, like euler-a and dpm++."""
    return re.sub(r"=([A-Za-z]\w*[-+][\w+-]*)(?=,|$)", r"='\1'", fields)


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def warn_of_files(methods: Sequence[str], model: nn.Module) -> None:
    """Warn about settings files that were made for other models."""
    for part in (part for method in methods for part in parts_of(method) if part.endswith(".json")):
        warn_of_another(part, load_settings(part), model)


def _expanded(method: str) -> tuple[str, float | None]:
    """A method with settings files replaced by their content, and the ratio among its settings, if any.

    A ratio that is a number is taken out of the method, as if given by --ratio; a ratio by level or step
    stays in it, and counts as 0.
    """
    parts, own = [], None
    for part in parts_of(method):
        if part.endswith(".json"):
            part = written(load_settings(part).config)
        name, settings = parse(part)
        if "ratio" in settings and merges(name):
            number = isinstance(settings["ratio"], (int, float))
            own = settings["ratio"] if number else 0.0
            if own or (
                number and settings.get("interval", 1) != 1
            ):  # ratio=0 with an interval: a forecast alone
                del settings["ratio"]
            part = spelled(name, settings)
        parts.append(part)
    return "+".join(parts), own
