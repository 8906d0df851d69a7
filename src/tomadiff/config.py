"""Every setting: what was asked for (`Config`), and what that comes to for a model (`ResolvedConfig`)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeGuard

import numpy as np

from .core import RefreshSchedule, num_kept
from .errors import ConfigError
from .methods import METHODS, MODULES, Method, PlanSettings

if TYPE_CHECKING:
    from .models import Family

CHOICES: dict[str, tuple[str, ...]] = {
    "method": tuple(METHODS),
    "regions": ("tile", "stripe", "global"),
    "assign": ("region", "global"),
    "where": ("block", "module", "span", "kv"),
    "unmerge": ("transpose", "pinv", "regression"),
    "share": ("kind", "block"),
}
MERGING = tuple(METHODS["toma"].defaults)  # the settings that a method has or has not; ToMA has them all
# The least value of settings that are whole numbers.
LEAST = {"refresh_destinations": 1, "refresh_weights": 1, "dense_blocks": 0, "dense_last_blocks": 0}
MAX_SCALE = 1e9  # sharper than single precision can tell cosines apart; times 1e39, they would overflow
# The paper's variants. How long they keep plans differs by family: `Family.paper_reuse`.
AS_PUBLISHED: dict[str, Any] = {"share": "kind", "dense_blocks": 0, "interval": 1, "unmerge": "transpose"}
PRESETS: dict[str, dict[str, Any]] = {
    "toma": {"regions": "tile", "assign": "global", "where": "module", **AS_PUBLISHED},
    "toma_once": {"regions": "tile", "assign": "global", "where": "block", **AS_PUBLISHED},
    "toma_tile": {"regions": "tile", "assign": "region", "where": "module", **AS_PUBLISHED},
    "toma_stripe": {"regions": "stripe", "assign": "region", "where": "module", **AS_PUBLISHED},
}

Ratio = float | Mapping[str | int, float]
Ranges = tuple[tuple[int | float, Ratio], ...]
Ratios = Ratio | Sequence[tuple[int | float, Ratio]] | str
Interval = int | Sequence[int] | str


@dataclass(frozen=True)
class Config:
    """Which steps run, and on how many tokens. `interval` and `ratio` are the two that matter.

    With neither of them, and nothing else that is about merging, tomadiff takes what is best for the sampler
    and the number of steps. `interval` alone merges nothing, `ratio` alone runs every step. Any other setting
    that is not given, or None, is the preset's or the method's own; the values below are ToMA's.

    interval: the model runs in the first step, in the last two, and in evenly spaced ones between, at most N
        apart; in the others its output is forecast. 1 runs every step. Or a list of the steps that run,
        counted from 0. "auto" chooses by sampler and number of steps; where no forecast would be close
        enough, every step runs, the first half of them on merged tokens unless a ratio was given.
    ratio (0.5): share of tokens removed, 0 <= ratio < 1. Or a mapping, by kind of site ({"self": 0.5,
        "mlp": 0.25}; {"joint": 0.25, "single": 0.5}) or by level of a UNet, named by its downsampling
        ({2: 0.75, 4: 0.25}). Or a list of step ranges, each with the step that it begins at, a number from 0
        or a share of all, and one of the above: [(0, 0.25), (0.5, 0.75)]. What is left out stays dense.
        "auto" is the method's own ratio with auto=True.
    auto: at the first call of each size, measure where merging gains, and leave the rest dense. The answer is
        kept on disk.
    method: "toma"; "tome", "tofu" and "todo" to compare with; "ideal" runs the same sites on the first tokens
        with no merging at all, a speed limit to measure against, not a way to make pictures.
    preset: a variant as its paper has it: "toma", "toma_once", "toma_tile" or "toma_stripe". Other settings
        go on top.
    regions ("tile"): merge within "tile"s, within "stripe"s of the sequence, or "global"ly.
    region_size (8): tokens on a tile's side; a stripe is as long as a tile has tokens. In video, a tile lies
        within a frame; give one size for each axis, as in (4, 4, 4), for boxes over time, height and width.
    assign ("region"): a token goes to destinations of its own "region", or "global"ly to any.
    where ("span"): merge around each "block", around each "module" in it, once around a "span" of
        consecutive blocks, or only the keys and values of self-attention ("kv"). In a model without blocks
        that can be merged as a whole, "module" or else "kv" is the default.
    modules (all): which of self-attention, cross-attention and MLP, for where="module".
    scale (1000): sharpness of the assignment; at 1000 nearly all of a token goes to its nearest destination.
    unmerge ("regression"): predict a token's change from all merged tokens of its region, by Gaussian-process
        regression; or copy it from the destination that the token went to ("transpose", the default with
        regions or assignment "global"); or use the exact pseudo-inverse "pinv", which pays at small scales.
    refresh_destinations (3), refresh_weights (1): steps between choosing destinations, and weights, anew; 6
        and 6 with regions or assignment "global", or where="kv".
    share ("block"): one plan for each block (or module, or span), or one for all sites of a "kind" and
        resolution.
    weigh_keys: let a merged key count as often as the tokens it stands for.
    dense_blocks (1), dense_last_blocks (0): leave the first and the last N blocks of each kind dense. With 1,
        the only block of a kind is merged all the same.
    shift: use a layout that is shifted by half a region (half a cell) in every other step that runs.
    """

    interval: Interval | None = None
    ratio: Ratios | None = None
    method: str = "toma"
    preset: str | None = None
    regions: str | None = None
    region_size: int | tuple[int, ...] | None = None
    assign: str | None = None
    where: str | None = None
    modules: Collection[str] | None = None
    scale: float | None = None
    unmerge: str | None = None
    refresh_destinations: int | None = None
    refresh_weights: int | None = None
    share: str | None = None
    weigh_keys: bool = False
    dense_blocks: int | None = None
    dense_last_blocks: int = 0
    shift: bool = False
    auto: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):  # a copy: nobody can change it from outside
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))
        self.resolve()  # raises if the settings can't be honoured in any model

    def asked(self) -> dict[str, Any]:
        """The settings that were given: enough to make the same again."""
        return {name: value for name, value in self.to_dict().items() if value != getattr(Config, name)}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def resolve(self, family: Family | None = None) -> ResolvedConfig:
        """What the settings come to in models of a family; raises a ConfigError if they can't be honoured.

        A setting that was not given is the preset's; else the method's own, which may depend on others.
        """
        _check_choice("method", self.method)
        method, given = METHODS[self.method], self._of_preset(family) | self.asked()
        _check_known(given, method)
        settings = self._with_defaults(given, method, family)
        ratio_given = given.get("ratio") not in (None, "auto")
        if not ratio_given:
            merges = settings["interval"] in (1, "auto") or settings["auto"]
            settings["ratio"] = method.defaults["ratio"] if merges else 0.0
        _check_values(settings, method)
        # without a family, nobody knows for how long a preset keeps plans
        _check_fit(settings, method, refreshes_known=self.preset is None or family is not None)
        plan = {field.name: settings[field.name] for field in fields(PlanSettings)}
        return ResolvedConfig(
            interval=settings["interval"],
            ratio=settings["ratio"],
            merges_as_fallback=settings["interval"] == "auto" and not ratio_given,
            method=self.method,
            plan=PlanSettings(**{name: value for name, value in plan.items() if value is not None}),
            where=settings["where"],
            modules=tuple(module for module in MODULES if module in _several(settings["modules"])),
            refresh=RefreshSchedule(settings["refresh_destinations"], settings["refresh_weights"]),
            share=settings["share"],
            weigh_keys=settings["weigh_keys"],
            dense_blocks=settings["dense_blocks"],
            dense_last_blocks=settings["dense_last_blocks"],
            shift=settings["shift"],
            auto=settings["auto"],
        )

    def _with_defaults(
        self, given: Mapping[str, Any], method: Method, family: Family | None
    ) -> dict[str, Any]:
        """All settings but the ratio. Those that others depend on come first."""
        settings = {**self.to_dict(), **method.defaults, **given}
        settings["interval"] = given.get("interval", 1 if given else "auto")
        _check_interval(settings["interval"])
        settings["auto"] = settings["auto"] or given.get("ratio") == "auto"
        if "where" not in given:
            settings["where"] = _offered(settings["where"], family)
        if "modules" not in given and settings["where"] != "module":
            settings["modules"] = MODULES  # a block or a span has all of them
        adjusted = method.dependent_defaults(settings)
        return settings | {name: value for name, value in adjusted.items() if name not in given}

    def _of_preset(self, family: Family | None) -> dict[str, Any]:
        if self.preset is None:
            return {}
        if self.preset not in tuple(PRESETS):
            raise ConfigError(
                f"unknown preset {self.preset!r}{_guess(self.preset, PRESETS)}; the presets are "
                f"{_listed(PRESETS)}"
            )
        destinations, weights = (1, 1) if family is None else family.paper_reuse
        return PRESETS[self.preset] | {"refresh_destinations": destinations, "refresh_weights": weights}


@dataclass(frozen=True)
class ResolvedConfig:
    """A `Config` with every default filled in, as the runtime uses it. `Config` explains the settings."""

    interval: int | tuple[int, ...] | Literal["auto"]
    ratio: Ratio | Ranges
    merges_as_fallback: bool  # nobody gave a ratio: merge only in generations where no step can be forecast
    method: str
    plan: PlanSettings  # what plans depend on; a method that has no such setting doesn't read it
    where: str
    modules: tuple[str, ...]
    refresh: RefreshSchedule  # for how many steps plans are kept
    share: str
    weigh_keys: bool
    dense_blocks: int
    dense_last_blocks: int
    shift: bool
    auto: bool

    @property
    def uneven(self) -> bool:
        """Whether steps of a generation differ."""
        return self.interval != 1 or isinstance(self.ratio, tuple)

    @property
    def merges(self) -> bool:
        """Whether anything is merged, in whichever generation."""
        return any(any(_numbers(ratio)) for _, ratio in self.ranges())

    def steps_per_plan(self) -> float:
        """How many steps use the same weights, on average; two layouts that alternate halve it."""
        return max(1.0, self.refresh.weights / (1 + self.shift))

    def ranges(self) -> Ranges:
        """Where ranges of steps begin, the first one at 0, and their ratios."""
        if not isinstance(self.ratio, tuple):
            return ((0, self.ratio),)
        return self.ratio if self.ratio[0][0] == 0 else ((0, 0.0), *self.ratio)

    def to_dict(self) -> dict[str, Any]:
        """All settings, by their names in `Config`; None for those that the method doesn't have.

        The ratio is None, too, if it was left to the sampler. `Config` takes all of this back.
        """
        own, values = METHODS[self.method].defaults, asdict(self)
        values |= values["plan"]
        values |= {f"refresh_{part}": steps for part, steps in values["refresh"].items()}
        if self.merges_as_fallback:
            values["ratio"] = None
        names = [field.name for field in fields(Config) if field.name != "preset"]
        return {name: values[name] if name in own or name not in MERGING else None for name in names}


class ConfigFields(TypedDict, total=False):
    """The fields of `Config`, for editors that show what `apply` and `merged` take."""

    interval: Interval | None
    ratio: Ratios | None
    method: str
    preset: str | None
    regions: str | None
    region_size: int | tuple[int, ...] | None
    assign: str | None
    where: str | None
    modules: Collection[str] | None
    scale: float | None
    unmerge: str | None
    refresh_destinations: int | None
    refresh_weights: int | None
    share: str | None
    weigh_keys: bool
    dense_blocks: int | None
    dense_last_blocks: int
    shift: bool
    auto: bool


def make(config: Config | None, settings: Mapping[str, Any]) -> Config:
    """The configuration that a call of `apply` asks for: a `Config`, or its fields by keyword."""
    if config is None:
        known = [field.name for field in fields(Config)]
        for name in settings:
            if name not in known:
                raise ConfigError(
                    f"unknown setting {name!r}{_guess(name, known)}; the settings are {_listed(known)}"
                )
        return Config(**settings)
    if not isinstance(config, Config):
        raise ConfigError(
            f"config must be a tomadiff.Config or the name of a settings file, not {config!r}; "
            "give single settings by keyword, as in ratio=0.5"
        )
    if any(value is not None for value in settings.values()):
        raise ConfigError(
            "give either a Config or a settings file, or a preset and settings by keyword, not both"
        )
    return config


def _offered(where: str, family: Family | None) -> str:
    """The default of `where`: modules, or else keys and values, if no blocks can be merged as a whole."""
    if family is None or where != "span" or "span" in family.offers:
        return where
    return "module" if "module" in family.offers else "kv"


# -- checks: each raises a ConfigError that says what to do ------------------------------------------------


def _check_known(given: Mapping[str, Any], method: Method) -> None:
    for name, value in given.items():
        if name in MERGING and name not in method.defaults:
            names = [field.name for field in fields(Config) if field.name != "preset"]
            has = [name for name in names if name in method.defaults or name not in MERGING]
            raise ConfigError(
                f"{name}={value!r} can't be honoured: method={method.name!r} has no such setting; it has "
                f"{_listed(has)}"
            )


def _check_choice(name: str, value: Any) -> None:
    if value not in CHOICES[name]:
        raise ConfigError(f"{name}={value!r} is unknown; choose one of {_listed(CHOICES[name])}")


def _check_interval(interval: Any) -> None:
    if isinstance(interval, tuple):
        growing = all(map(_is_int, interval)) and all(a < b for a, b in pairwise(interval))
        if not growing or interval[:1] != (0,):
            raise ConfigError(
                f"interval={list(interval)!r} must list the steps that run, as in [0, 3, 6, 8, 9]: numbers "
                "that grow, the first of them 0, since a forecast needs an output"
            )
    elif interval != "auto" and (not _is_int(interval) or interval < 1):
        raise ConfigError(
            f'interval={interval!r} must be a whole number of at least 1, a list of steps, or "auto"'
        )


def _check_values(settings: Mapping[str, Any], method: Method) -> None:
    """Settings one by one; those that the method doesn't have are None, and left out."""
    for name in CHOICES:
        if name not in MERGING or name in method.defaults:
            _check_choice(name, settings[name])
    _check_modules(settings["modules"], settings["where"])
    if "region_size" in method.defaults:
        _check_region_size(settings["region_size"])
    for name, least in LEAST.items():
        if not _is_int(settings[name]) or settings[name] < least:
            raise ConfigError(f"{name}={settings[name]!r} must be a whole number of at least {least}")
    _check_ratio(settings, method)
    for name in ("weigh_keys", "shift", "auto"):
        if not isinstance(settings[name], bool):
            raise ConfigError(f"{name}={settings[name]!r} must be True or False")
    scale = settings["scale"]
    if "scale" in method.defaults and (not _is_number(scale) or not 0 < scale <= MAX_SCALE):
        raise ConfigError(
            f"scale={scale!r} must be a positive number, at most {MAX_SCALE:g}; 1000 is close to a hard "
            "assignment"
        )


def _check_modules(modules: Any, where: str) -> None:
    given = _several(modules)
    if not isinstance(given, Collection) or not given or any(each not in MODULES for each in given):
        raise ConfigError(f"modules={modules!r} must be one or more of {_listed(MODULES)}")
    if where != "module" and set(given) != set(MODULES):
        raise ConfigError(f'modules={modules!r} needs where="module"; where={where!r} leaves no choice')


def _check_region_size(region_size: Any) -> None:
    sizes = region_size if isinstance(region_size, tuple) else (region_size,)
    if not sizes or not all(_is_int(size) and size >= 1 for size in sizes):
        raise ConfigError(
            f"region_size={region_size!r} must be a whole number of at least 1, or one for each axis of the "
            "grid of tokens, as in (4, 4, 4)"
        )


def _check_ratio(settings: Mapping[str, Any], method: Method) -> None:
    ratio = settings["ratio"]
    parts = [ratio]
    if isinstance(ratio, tuple):
        _check_ranges(ratio)
        parts = [part for _, part in ratio]
        if settings["auto"]:
            raise ConfigError(
                "auto=True can't be honoured with a ratio by range of steps: it measures one; give a number, "
                "or ratios by level or kind"
            )
    for part in parts:
        _check_parts(part)
        for number in filter(None, _numbers(part)):
            method.check_ratio(number)
            if "region_size" in method.defaults and settings["regions"] != "global":
                _check_removes(number, settings["region_size"])


def _check_ranges(ranges: tuple[Any, ...]) -> None:
    pairs = [pair for pair in ranges if isinstance(pair, tuple) and len(pair) == 2]
    starts = [start for start, _ in pairs]
    if (
        not pairs
        or len(pairs) < len(ranges)
        or not all(map(_is_start, starts))
        or len({type(start) for start in starts if start}) > 1  # 0 may be a step or a share
        or any(start >= after for start, after in pairwise(starts))
    ):
        raise ConfigError(
            f"ratio={list(ranges)!r} must have pairs of where a range of steps begins and its ratio, as in "
            "[(0, 0.25), (0.5, 0.75)], with steps (ints from 0) or shares of them (floats below 1) that grow"
        )


def _check_parts(ratio: Any) -> None:
    """A number, or numbers by part of the model."""
    for number in _numbers(ratio):
        if not _is_number(number) or not 0 <= number < 1:
            raise ConfigError(
                f"ratio={number!r} must be a number, at least 0 and below 1: the share of tokens removed; "
                'or "auto"'
            )
    if not isinstance(ratio, Mapping):
        return
    if not ratio:
        raise ConfigError("ratio={} names no part of the model; give a number, or ratios by kind or level")
    if len({type(key) for key in ratio}) > 1 or not all(isinstance(key, (str, int)) for key in ratio):
        raise ConfigError(f"ratio={dict(ratio)!r} must have keys of one sort, kinds of site or levels")


def _check_removes(ratio: float, region_size: int | tuple[int, ...]) -> None:
    """Whether a ratio removes any token from a region of this size."""
    region = region_size**2 if isinstance(region_size, int) else math.prod(region_size)
    if num_kept(region, ratio) == region:
        raise ConfigError(
            f"ratio={ratio!r} removes nothing from regions of {region} tokens: "
            + (f"raise it to {1 / region:.3g} or more, or " if region > 1 else "")
            + f"raise region_size={region_size}"
        )


def _check_fit(settings: Mapping[str, Any], method: Method, refreshes_known: bool) -> None:
    """Settings that are fine one by one, but not together."""
    destinations, weights = settings["refresh_destinations"], settings["refresh_weights"]
    if refreshes_known and destinations % weights:
        raise ConfigError(
            f"refresh_destinations={destinations} must be a multiple of refresh_weights={weights}, since new "
            "destinations need new weights"
        )
    if refreshes_known and not method.keeps_destinations and destinations != weights:
        raise ConfigError(
            f"method={method.name!r} finds destinations and who goes there in one act: "
            f"refresh_destinations={destinations} and refresh_weights={weights} must be the same"
        )
    if settings["shift"] and settings["regions"] == "global":
        raise ConfigError('shift=True needs regions="tile" or "stripe": one global region can\'t be shifted')
    if settings["where"] == "kv" and settings["unmerge"] == "pinv":
        raise ConfigError('unmerge="pinv" can\'t be honoured: where="kv" has nothing to unmerge')
    for setting, value, why in method.requires:
        if settings[setting] != value:
            raise ConfigError(f'method="{method.name}" {why}: it needs {setting}="{value}"')


def _numbers(ratio: Any) -> Collection[Any]:
    """The numbers in a ratio, which is one number, or one for each of some parts of the model."""
    return ratio.values() if isinstance(ratio, Mapping) else (ratio,)


def _several(modules: Any) -> Any:
    return (modules,) if isinstance(modules, str) else modules


def _plain(value: Any) -> Any:
    """Copied into dicts, tuples and Python's own numbers, which compare by value and which JSON takes."""
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes)):
        return tuple(map(_plain, sorted(value, key=str) if isinstance(value, Set) else value))
    return value


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_start(value: object) -> bool:
    """Whether this may be where a range begins: a step, or a share of all steps."""
    return _is_number(value) and value >= 0 and (not isinstance(value, float) or value < 1)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _guess(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
