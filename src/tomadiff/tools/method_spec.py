"""Ways to run a pipeline, by name, as the benchmark and the evaluation take them on the command line.

A way is `dense`; `tomadiff` (the default of this package), a preset or another method; `tomesd` (the real
package); or a cache of diffusers. Single settings follow a colon, and several ways are joined by a plus:
`tomadiff:where=span,shift=True`, `first-block:threshold=0.1+tomadiff`. A settings file (`fast.json`) is the
way that is written in it, so that what is measured doesn't change with the file.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import diffusers
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig
from torch import nn

from tomadiff.config import DEFAULTS, PRESETS, Config, make
from tomadiff.errors import ConfigError
from tomadiff.models import Family, family_of
from tomadiff.runtime.registration import attached, denoiser, denoisers
from tomadiff.runtime.session import Session
from tomadiff.settings_file import load as load_settings
from tomadiff.settings_file import warn_of_another

DENSE, TOMESD, OURS = "dense", "tomesd", "tomadiff"
CACHES: dict[str, Callable[..., Any]] = {
    "first-block": FirstBlockCacheConfig,
    "taylorseer": TaylorSeerCacheConfig,
}
# our default, then the paper's variants and the other methods as they were published
METHODS = (
    "ideal",
    OURS,
    *PRESETS,
    *(name for name in DEFAULTS if name not in ("toma", "ideal")),
)
NAMES = (DENSE, *METHODS, TOMESD)
TOMESD_SETTINGS = {"max_downsample": 4}  # its own default, 1, finds nothing to merge in SDXL


def label(way: str, ratio: float) -> str:
    return f"{way} at {ratio:g}" if ratio else way


def configuration(way: str, ratio: float, family: Family) -> Config:
    """The configuration of a way that is our own."""
    name, settings = parse(way)
    if name not in METHODS:
        raise ConfigError(
            f"unknown method {way!r}; there are {', '.join(NAMES)}, and {OURS}:setting=value,..."
        )
    if name in DEFAULTS and name not in PRESETS:
        settings = {"method": name, **settings}
    preset = name if name in PRESETS else None
    return make(None, preset, {"ratio": ratio, **settings}, family.paper_reuse, family.offers)


def written(config: Config) -> str:
    """The way that a configuration is."""
    settings = config.asked()
    return _spelled(settings.pop("method", OURS), settings)


def _spelled(name: str, settings: dict[str, Any]) -> str:
    """The inverse of `parse`."""
    fields = [f"{key}={value if isinstance(value, str) else repr(value)}" for key, value in settings.items()]
    return f"{name}:{','.join(fields)}" if fields else name


def usual(ratios: Sequence[float], family: Family) -> list[str]:
    """All methods that a family of models allows at one of these ratios, and that are installed."""
    possible = []
    for name in NAMES:
        try:
            pairs([name], ratios, family)
            possible.append(name)
        except (ConfigError, ImportError):
            continue
    return possible


def pairs(
    ways: Sequence[str], ratios: Sequence[float], family: Family
) -> tuple[list[tuple[str, float]], list[str]]:
    """(way, ratio): each way at all ratios it can do, or at its own; dense and caches at 0.

    And what was left out, why.
    """
    found, left_out = [], []
    for way, own in dict.fromkeys(map(_settled, ways)):
        parts = way.split("+")
        if sum(map(_merges, parts)) > 1:
            raise ConfigError(f"{way!r} merges twice: take one method, and caches beside it")
        if own is not None or not any(map(_merges, parts)):
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


def check(part: str, ratio: float, family: Family) -> None:
    """Complain about a way that can't be had for a family of models."""
    name, settings = parse(part)
    if name == DENSE:
        if settings:
            raise ConfigError(f"{part!r}: {DENSE} has no settings; leave them out")
        return
    if name == TOMESD:
        if family.name != "unet":
            raise ConfigError(f"tomesd knows UNets only, not {family.covers}; leave it out, or take tome")
        if find_spec("tomesd") is None:
            raise ImportError("tomesd is not there to compare with: pip install 'tomadiff[bench]'")
        configuration(
            "tome", settings.get("ratio", ratio), family
        )  # what tome can't do, the real one would do less of in silence
        import tomesd

        _check_settings(part, settings, tomesd.apply_patch)
    elif name in CACHES:
        if not any(hasattr(getattr(diffusers, model, None), "enable_cache") for model in family.models):
            raise ConfigError(f"{name} can't be had: diffusers has no caches for {family.covers}")
        _check_settings(part, settings, CACHES[name])
    else:
        configuration(part, ratio, family)


def check_fit(pipe: Any, ways: Sequence[tuple[str, float]]) -> None:
    """Complain about what this very model, or pipeline, can't honour."""
    for way in ways:
        with switched_on(pipe, *way):
            pass


@contextmanager
def switched_on(pipe: Any, way: str, ratio: float) -> Iterator[None]:
    """Run a pipeline, or a model, in a way for the length of a `with` block."""
    with ExitStack() as stack:
        # merging goes on first, so that caches are around it and keep whole tokens
        for part in sorted(way.split("+"), key=_merges, reverse=True):
            stack.enter_context(_part_on(pipe, part, ratio))
        yield


@contextmanager
def _part_on(pipe: Any, part: str, ratio: float) -> Iterator[None]:
    name, settings = parse(part)
    model, _ = denoiser(pipe)
    if name == DENSE:
        yield
    elif name == TOMESD:
        import tomesd

        tomesd.apply_patch(model, **{"ratio": ratio, **TOMESD_SETTINGS, **settings})
        try:
            yield
        finally:
            tomesd.remove_patch(model)
    elif name in CACHES:
        model.enable_cache(CACHES[name](**settings))
        try:
            yield
        finally:
            model.disable_cache()
    else:
        with ExitStack() as stack:
            for model, pipeline in denoisers(pipe):
                family = family_of(model)
                patch = Session(model, family, configuration(part, ratio, family), pipeline)
                stack.enter_context(attached(patch))
            yield


def parse(part: str) -> tuple[str, dict[str, Any]]:
    """A name and the settings behind its colon, which are written as for a call; words need no quotes."""
    name, _, fields = part.partition(":")
    try:
        call = ast.parse(f"f({fields})", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        assert len({keyword.arg for keyword in call.keywords}) == len(call.keywords)
        return name, {keyword.arg or "": _value(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise ConfigError(f"can't read {part!r}: write name:setting=value,setting=value, each once") from None


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def _check_settings(part: str, settings: dict[str, Any], function: Callable[..., Any]) -> None:
    known = inspect.signature(function).parameters
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"{part!r}: unknown setting {name!r}; there are {', '.join(known)}")
        if isinstance(known[name].default, (int, float)) and not isinstance(value, (int, float)):
            raise ConfigError(f"{part!r}: {name} is no word, but something like {known[name].default}")


def warn_of_files(ways: Sequence[str], model: nn.Module) -> None:
    """Say which settings files were made for other models."""
    for part in (part for way in ways for part in way.split("+") if part.endswith(".json")):
        warn_of_another(part, load_settings(part), model)


def _settled(way: str) -> tuple[str, float | None]:
    """With what is written in settings files instead of their names; and the ratio, if the way has its own.

    One number is told apart from the way, as if it was asked for with --ratio; ratios by part or step stay in
    it, and count as 0.
    """
    parts, own = [], None
    for part in way.split("+"):
        name, settings = parse(written(load_settings(part).config) if part.endswith(".json") else part)
        if "ratio" in settings and _merges(name):
            own = settings["ratio"] if isinstance(settings["ratio"], (int, float)) else 0.0
            if own:
                del settings["ratio"]
            part = _spelled(name, settings)
        parts.append(part)
    return "+".join(parts), own


def _merges(part: str) -> bool:
    return parse(part)[0] not in (DENSE, *CACHES)
