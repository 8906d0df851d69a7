"""Ways to run a pipeline, by name, as the benchmark and the evaluation take them on the command line.

A way is `dense`; `auto` (what `tomadiff.apply(pipe)` chooses); `tomadiff`, a preset or another method that we
have; or a rival: fewer steps, a cache, the real ToMeSD. Single settings follow a colon, and several ways are
joined by a plus: `tomadiff:interval=3`, `steps:13,solver=dpm++`, `first-block:threshold=0.1+tomadiff`. A
settings file (`fast.json`) is the way that is written in it, so that what is measured doesn't change with it.
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

# our default, then the paper's variants and the other methods as they were published
METHODS = (
    "ideal",
    OURS,
    *PRESETS,
    *(name for name in methods.METHODS if name not in ("toma", "ideal")),
)
USUAL = (DENSE, *METHODS, "tomesd")  # what a benchmark of single calls compares
NAMES = (DENSE, AUTO, *METHODS, *RIVALS)
SHORTHANDS = {"steps": "count"}  # the setting that a bare value behind the colon is


def label(way: str, ratio: float) -> str:
    return f"{way} at {ratio:g}" if ratio else way


def configuration(way: str, ratio: float, family: Family | None) -> Config:
    """The configuration of a way that is our own; forecasts need no family."""
    preset, settings = asked(way, ratio)
    return make(None, preset, settings, *(() if family is None else (family.paper_reuse, family.offers)))


def asked(way: str, ratio: float) -> tuple[str | None, Settings]:
    """The preset and the settings that `tomadiff.apply` is given for a way that is our own."""
    name, settings = parse(way)
    if name == AUTO:
        return None, settings
    if name not in METHODS:
        raise ConfigError(
            f"unknown method {way!r}; there are {', '.join(NAMES)}, and {OURS}:setting=value,..."
        )
    if name in methods.METHODS and name not in PRESETS:
        settings = {"method": name, **settings}
    if ratio or merges(way):
        settings = {"ratio": ratio, **settings}
    return (name if name in PRESETS else None), settings


def written(config: Config) -> str:
    """The way that a configuration is."""
    settings = config.asked()
    return spelled(settings.pop("method", OURS), settings)


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
    ways: Sequence[str], ratios: Sequence[float], family: Family | None
) -> tuple[list[tuple[str, float]], list[str]]:
    """(way, ratio): each way at all ratios it can do, or at its own; what doesn't merge at 0.

    And what was left out, why.
    """
    found, left_out = [], []
    for way, own in dict.fromkeys(map(_settled, ways)):
        parts = parts_of(way)
        if sum(map(merges, parts)) > 1:
            raise ConfigError(f"{way!r} merges twice: take one method, and caches beside it")
        if own is not None or not any(map(merges, parts)):
            for part in parts:
                check(part, own or 0.0, family)
            found.append((way, own or 0.0))
            continue
        possible = []
        for ratio in dict.fromkeys(ratios):
            try:
                for part in parts:
                    check(part, ratio, family)
                possible.append((way, ratio))
            except ConfigError as error:
                reason = error
                left_out.append(f"{label(way, ratio)} is left out: {error}")
        if not possible:
            raise reason
        found += possible
    # a way may be asked for twice, by --ratio and with a ratio of its own
    return sorted(dict.fromkeys(found), key=lambda pair: pair[1]), left_out


def check(part: str, ratio: float, family: Family | None) -> None:
    """Complain about a way that can't be had for a family of models."""
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


def check_fit(target: Any, ways: Sequence[tuple[str, float]]) -> None:
    """Complain about what this very model, or pipeline, can't honour."""
    for way, ratio in ways:
        # rivals count the steps of a pipeline, which a model alone has none of
        if isinstance(target, nn.Module) and not all(map(is_per_step, parts_of(way))):
            continue
        with switched_on(target, way, ratio):
            pass


@contextmanager
def switched_on(target: Any, way: str, ratio: float) -> Iterator[None]:
    """Run a pipeline, or a model, in a way for the length of a `with` block."""
    with ExitStack() as stack:
        # merging goes on first, so that caches are around it and keep whole tokens
        for part in sorted(parts_of(way), key=lambda part: _is_inner(part, ratio), reverse=True):
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
        preset, settings = asked(part, ratio)
        with tomadiff.merged(target, preset=preset, **settings):
            yield


def calibrate(target: Any, way: str, draw: Callable[[], Any]) -> None:
    """Let the parts of a way learn from a dense picture what they have to know of a model."""
    for part in parts_of(way):
        name, settings = parse(part)
        if name in RIVALS:
            RIVALS[name].calibrate(target, settings, draw)


def rival_settings(part: str, ratio: float) -> Settings:
    """With the ratio of those that merge."""
    name, settings = parse(part)
    return {"ratio": ratio, **settings} if RIVALS[name].merges else settings


def steps_of(way: str) -> int | None:
    """The number of steps that a way asks for itself."""
    counts = (parse(part)[1]["count"] for part in parts_of(way) if parse(part)[0] == "steps")
    return next(counts, None)


def lists_steps(way: str) -> bool:
    """Whether a way says which steps run, one by one, and so is for one number of steps."""
    return any(isinstance(parse(part)[1].get("interval"), (list, tuple)) for part in parts_of(way))


def decides(way: str) -> bool:
    """Whether values decide what is computed, so that the work differs from picture to picture."""
    return any(name in RIVALS and RIVALS[name].decides for name, _ in map(parse, parts_of(way)))


def is_per_step(part: str) -> bool:
    """Whether single calls of the model show what a way does; if not, only whole generations do."""
    name, settings = parse(part)
    if name in RIVALS:
        return RIVALS[name].per_step
    return name != AUTO and settings.get("interval", 1) == 1


def merges(part: str) -> bool:
    """Whether a part of a way takes a ratio; an interval alone leaves all tokens as they are."""
    name, settings = parse(part)
    if name in RIVALS:
        return RIVALS[name].merges
    forecasts = name == OURS and settings.get("interval", 1) != 1 and "ratio" not in settings
    return name not in (DENSE, AUTO) and not forecasts


def parts_of(way: str) -> list[str]:
    """What is joined by a plus, which the name of a solver may end with, too: `steps:13,solver=dpm++`."""
    return re.split(r"\+(?=[^+\d,])", way)


def parse(part: str) -> tuple[str, Settings]:
    """A name and the settings behind its colon, which are written as for a call; words need no quotes."""
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
    """Words that Python would not read as one, like euler-a and dpm++, in quotes."""
    return re.sub(r"=([A-Za-z]\w*[-+][\w+-]*)(?=,|$)", r"='\1'", fields)


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def warn_of_files(ways: Sequence[str], model: nn.Module) -> None:
    """Say which settings files were made for other models."""
    for part in (part for way in ways for part in parts_of(way) if part.endswith(".json")):
        warn_of_another(part, load_settings(part), model)


def _settled(way: str) -> tuple[str, float | None]:
    """With what is written in settings files instead of their names; and the ratio, if the way has its own.

    One number is told apart from the way, as if it was asked for with --ratio; ratios by part or step stay in
    it, and count as 0.
    """
    parts, own = [], None
    for part in parts_of(way):
        if part.endswith(".json"):
            part = written(load_settings(part).config)
        name, settings = parse(part)
        if "ratio" in settings and merges(name):
            number = isinstance(settings["ratio"], (int, float))
            own = settings["ratio"] if number else 0.0
            if own or (number and settings.get("interval", 1) != 1):  # which alone doesn't merge either
                del settings["ratio"]
            part = spelled(name, settings)
        parts.append(part)
    return "+".join(parts), own
