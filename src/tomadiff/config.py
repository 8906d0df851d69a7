"""Every setting, in one frozen and validated place, and the paper's variants by name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, TypedDict, TypeGuard, cast

import numpy as np

from .core import RefreshSchedule, num_kept
from .errors import ConfigError
from .methods import METHODS, MODULES, PlanSettings

CHOICES: dict[str, tuple[str, ...]] = {
    "method": tuple(METHODS),
    "regions": ("tile", "stripe", "global"),
    "assign": ("region", "global"),
    "where": ("block", "module", "span", "kv"),
    "unmerge": ("transpose", "pinv", "regression"),
    "share": ("kind", "block"),
}
# Every setting that a method may have defaults for. What others depend on comes first.
MERGING = tuple(METHODS["toma"].defaults)

Ratio = float | Mapping[str | int, float]
Ratios = Ratio | Sequence[tuple[int | float, Ratio]] | str
Interval = int | Sequence[int] | str


@dataclass(frozen=True)
class Config:
    """Which steps run, and on how many tokens. `interval` and `ratio` are the two that matter.

    With neither of them, and nothing else that is about merging, tomadiff takes what is best for the sampler
    and the number of steps. `interval` alone merges nothing, `ratio` alone runs every step. Any other setting
    that is not given, or None, is the method's own; the values below are ToMA's.

    interval: the model runs in the first two steps, in every so many-th after them and in the last one; in
        the others its output is forecast. 1 runs every step. Or a list of the steps that run, from 0. "auto"
        chooses by sampler and number of steps; where no forecast would hold, every step runs, and, unless
        `ratio` says otherwise, runs on merged tokens.
    ratio (0.5): share of tokens removed, 0 <= ratio < 1. Or a mapping, by kind of site ({"self": 0.5,
        "mlp": 0.25}; {"joint": 0.25, "single": 0.5}) or by level of a UNet, named by its downsampling
        ({2: 0.75, 4: 0.25}). Or a list of step ranges, each with the step that it begins at, a number from 0
        or a share of all, and one of the above: [(0, 0.25), (0.5, 0.75)]. What is left out stays dense.
        "auto" is the method's own ratio with auto=True.
    auto: at the first call of each size, measure where merging gains, and leave the rest dense. The answer is
        kept on disk.
    method: "toma"; "tome", "tofu" and "todo" to compare with; "ideal" runs the same sites on the first tokens
        with no merging at all, a speed limit to measure against, not a way to make pictures.
    regions ("tile"): merge within "tile"s, within "stripe"s of the sequence, or "global"ly.
    region_size (8): tokens on a tile's side; a stripe is as long as a tile has tokens. In video, a tile lies
        within a frame; give one size for each axis, as in (4, 4, 4), for boxes over time, height and width.
    assign ("region"): a token goes to destinations of its own "region", or "global"ly to any.
    where ("span"): merge around each "block", around each "module" in it, once around a "span" of
        consecutive blocks, or only the keys and values of self-attention ("kv").
    modules (all): which of self-attention, cross-attention and MLP, for where="module".
    scale (1000): sharpness of the assignment; at 1000 nearly all of a token goes to its nearest destination.
    unmerge ("regression"): predict a token's change from all merged tokens of its region, by Gaussian-process
        regression; or copy it from the destination that the token went to ("transpose", the default with
        regions or assignment "global"); or use the exact pseudo-inverse "pinv", which pays at small scales.
    refresh_destinations (6), refresh_weights (1): steps between choosing destinations, and weights, anew.
    share ("block"): one plan for each block (or module, or span), or one for all sites of a "kind" and
        resolution.
    weigh_keys: let a merged key count as often as the tokens it stands for.
    dense_blocks (1), dense_last_blocks (0): leave the first, the last so many blocks of each kind dense; the
        first of a kind only where there are others.
    shift (True): use a layout that is shifted by half a region (half a cell) in every other step that runs;
        not by default with regions or assignment "global", or where="kv".
    """

    interval: Interval | None = None
    ratio: Ratios | None = None
    method: str = "toma"
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
    shift: bool | None = None
    auto: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))
        self._check_choices(["method"])
        self._take_defaults()
        own = METHODS[self.method].defaults
        self._check_choices([name for name in CHOICES if name in own])
        self._check_modules()
        self._check_region_size()
        for name, least in (
            ("refresh_destinations", 1),
            ("refresh_weights", 1),
            ("dense_blocks", 0),
            ("dense_last_blocks", 0),
        ):
            value = getattr(self, name)
            if not _is_int(value) or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}")
        if self.ratio is not None:
            self._check_ratio()
        for name in ("weigh_keys", "shift", "auto"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        if "scale" in own and (not _is_number(self.scale) or not 0 < self.scale < float("inf")):
            raise ConfigError(
                f"scale={self.scale!r} must be a positive number; 1000 is close to a hard assignment"
            )
        self._check_fit()

    def _take_defaults(self) -> None:
        own = METHODS[self.method].defaults
        if self.ratio == "auto":
            object.__setattr__(self, "ratio", None)
            object.__setattr__(self, "auto", True)
        self._take_interval()
        for name in MERGING:
            if getattr(self, name) is None and name != "ratio":
                object.__setattr__(self, name, self._default(name))
            elif name not in own:
                has = [field.name for field in fields(self) if field.name in own or field.name not in MERGING]
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} can't be honoured: method={self.method!r} has no such "
                    f"setting; it has {_listed(has)}"
                )

    def _take_interval(self) -> None:
        """Which steps run, and a ratio to go with that; the ratio stays None where the sampler decides."""
        if self.interval is None:
            merging = [field.name for field in fields(self) if field.name != "interval"]
            asked = any(getattr(self, name) != getattr(type(self), name) for name in merging)
            object.__setattr__(self, "interval", 1 if asked else "auto")
        if isinstance(self.interval, Sequence) and not isinstance(self.interval, str):
            object.__setattr__(self, "interval", tuple(self.interval))
        self._check_interval()
        if self.ratio is None and self.interval != "auto":
            own = METHODS[self.method].defaults["ratio"] if self.interval == 1 or self.auto else 0.0
            object.__setattr__(self, "ratio", own)

    def _check_interval(self) -> None:
        steps = self.interval if isinstance(self.interval, tuple) else ()
        if isinstance(self.interval, tuple):
            if not all(map(_is_int, steps)) or steps[:2] != (0, 1) or any(a >= b for a, b in pairwise(steps)):
                raise ConfigError(
                    f"interval={list(steps)!r} must list the steps that run, as in [0, 1, 4, 7, 9]: numbers "
                    "that grow, the first two of them 0 and 1, since a forecast needs two"
                )
        elif self.interval != "auto" and (not _is_int(self.interval) or self.interval < 1):
            raise ConfigError(
                f'interval={self.interval!r} must be a whole number of at least 1, a list of steps, or "auto"'
            )

    def _default(self, name: str) -> Any:
        """The method's own; what it depends on comes before it in MERGING, and is settled."""
        if name == "modules" and self.where != "module":
            return MODULES  # a block or a span has all of them
        method = METHODS[self.method]
        beyond_regions = "global" in (self.regions, self.assign) or self.where == "kv"
        own = {**method.defaults, **(method.defaults_beyond_regions if beyond_regions else {})}
        return own.get(name)

    def _check_choices(self, names: Iterable[str]) -> None:
        for name in names:
            if getattr(self, name) not in CHOICES[name]:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is unknown; choose one of {_listed(CHOICES[name])}"
                )

    def _check_fit(self) -> None:
        """Settings that are fine one by one, but not together."""
        refresh = self.refresh_schedule()
        if refresh.destinations % refresh.weights:
            raise ConfigError(
                f"refresh_destinations={self.refresh_destinations} must be a multiple of "
                f"refresh_weights={self.refresh_weights}, since new destinations need new weights"
            )
        if self.shift and self.regions == "global":
            raise ConfigError(
                'shift=True needs regions="tile" or "stripe": one global region can\'t be shifted'
            )
        method = METHODS[self.method]
        if not method.keeps_destinations and self.refresh_destinations != self.refresh_weights:
            raise ConfigError(
                f"method={self.method!r} finds destinations and who goes there in one act: "
                f"refresh_destinations={self.refresh_destinations} and "
                f"refresh_weights={self.refresh_weights} must be the same"
            )
        if self.where == "kv" and self.unmerge == "pinv":
            raise ConfigError('unmerge="pinv" can\'t be honoured: where="kv" has nothing to unmerge')
        if self.auto and isinstance(self.ratio, tuple):
            raise ConfigError(
                "auto=True can't be honoured with a ratio by range of steps: it measures one; give a number, "
                "or ratios by level or kind"
            )
        for setting, value, why in method.requires:
            if getattr(self, setting) != value:
                raise ConfigError(f'method="{self.method}" {why}: it needs {setting}="{value}"')

    def _check_ratio(self) -> None:
        if isinstance(self.ratio, Sequence) and not isinstance(self.ratio, str):
            object.__setattr__(self, "ratio", self._checked_ranges(self.ratio))
        else:
            object.__setattr__(self, "ratio", self._checked_parts(self.ratio))

    def _checked_ranges(self, ranges: Sequence[Any]) -> tuple[tuple[int | float, Ratio], ...]:
        wrong = ConfigError(
            f"ratio={ranges!r} must have pairs of where a range of steps begins and its ratio, as in "
            "[(0, 0.25), (0.5, 0.75)], with steps (ints from 0) or shares of them (floats below 1) that grow"
        )
        pairs = [tuple(pair) for pair in ranges if isinstance(pair, Sequence) and len(pair) == 2]
        if not pairs or len(pairs) < len(ranges):
            raise wrong
        starts = [start for start, _ in pairs]
        # 0 may be the one or the other
        if not all(map(_is_step, starts)) or len({type(start) for start in starts if start}) > 1:
            raise wrong
        if any(start >= after for start, after in pairwise(starts)):
            raise wrong
        return tuple((start, self._checked_parts(ratio)) for start, ratio in pairs)

    def _checked_parts(self, ratio: Any) -> Ratio:
        """A number, or numbers by part of the model."""
        by_part = isinstance(ratio, Mapping)
        for value in _numbers(ratio):
            if not _is_number(value) or not 0 <= value < 1:
                raise ConfigError(
                    f"ratio={value!r} must be a number, at least 0 and below 1: the share of tokens "
                    'removed; or "auto"'
                )
            if value > 0:
                self._check_reachable(value)
        if not by_part:
            return ratio
        if not ratio:
            raise ConfigError(
                "ratio={} names no part of the model; give a number, or ratios by kind or level"
            )
        if len({type(key) for key in ratio}) > 1 or not all(isinstance(key, (str, int)) for key in ratio):
            raise ConfigError(f"ratio={dict(ratio)!r} must have keys of one sort, kinds of site or levels")
        return dict(ratio)  # a copy: nobody can change it from outside

    def _check_reachable(self, ratio: float) -> None:
        METHODS[self.method].check_ratio(ratio)
        if self.region_size is None or self.regions == "global":
            return
        sizes = (self.region_size,) * 2 if isinstance(self.region_size, int) else self.region_size
        region = math.prod(sizes)
        if num_kept(region, ratio) == region:
            raise ConfigError(
                f"ratio={ratio!r} removes nothing from regions of {region} tokens: "
                + (f"raise it to {1 / region:.3g} or more, or " if region > 1 else "")
                + f"raise region_size={self.region_size}"
            )

    def _check_region_size(self) -> None:
        if self.region_size is None:
            return
        sizes = self.region_size if isinstance(self.region_size, (tuple, list)) else [self.region_size]
        if not sizes or not all(_is_int(size) and size >= 1 for size in sizes):
            raise ConfigError(
                f"region_size={self.region_size!r} must be a whole number of at least 1, "
                "or one for each axis of the grid of tokens, as in (4, 4, 4)"
            )
        if isinstance(self.region_size, list):
            object.__setattr__(self, "region_size", tuple(sizes))

    def _check_modules(self) -> None:
        given = [self.modules] if isinstance(self.modules, str) else self.modules
        if not isinstance(given, Collection) or not given or any(each not in MODULES for each in given):
            raise ConfigError(f"modules={self.modules!r} must be one or more of {_listed(MODULES)}")
        modules = tuple(module for module in MODULES if module in given)
        if modules != MODULES and self.where != "module":
            raise ConfigError(
                f'modules={modules!r} needs where="module"; where={self.where!r} leaves no choice'
            )
        object.__setattr__(self, "modules", modules)

    @property
    def uneven(self) -> bool:
        """Whether steps of a generation differ."""
        return self.interval != 1 or isinstance(self.ratio, tuple)

    @property
    def merges(self) -> bool:
        """Whether anything is merged, in whichever generation."""
        return any(any(_numbers(ratio)) for _, ratio in self.ranges())

    def ranges(self) -> tuple[tuple[int | float, Ratio], ...]:
        """Where ranges of steps begin, the first one at 0, and their ratios."""
        if self.ratio is None:
            return ((0, METHODS[self.method].defaults["ratio"]),)
        if not isinstance(self.ratio, tuple):
            return ((0, cast(Ratio, self.ratio)),)  # lists were made tuples
        return self.ratio if self.ratio[0][0] == 0 else ((0, 0.0), *self.ratio)

    def refresh_schedule(self) -> RefreshSchedule:
        """For how many steps plans are kept."""
        return RefreshSchedule(self.refresh_destinations or 1, self.refresh_weights or 1)

    def steps_per_plan(self) -> float:
        """How many steps use the same weights, on average; two layouts that alternate halve it."""
        return max(1.0, self.refresh_schedule().weights / (1 + bool(self.shift)))

    def plan_settings(self) -> PlanSettings:
        """What plans depend on; a method that has no such setting doesn't read it."""
        given = {each.name: getattr(self, each.name) for each in fields(PlanSettings)}
        return PlanSettings(**{name: value for name, value in given.items() if value is not None})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def asked(self) -> dict[str, Any]:
        """Interval and ratio, and what else is not the method's own: enough to make the same again."""
        decisive = {name: getattr(self, name) for name in ("regions", "assign", "where")}  # for defaults
        own = Config(method=self.method, **decisive).to_dict()
        own |= {name: getattr(Config(method=self.method), name) for name in decisive}
        own |= {"method": "toma", "interval": None, "ratio": None}
        asked = {name: value for name, value in self.to_dict().items() if value != own[name]}
        if asked["interval"] == 1 and "ratio" in asked:  # a ratio alone says so
            del asked["interval"]
        return asked


class MergingSettings(TypedDict, total=False):
    """The fields of `Config` beside `interval` and `ratio`, for editors that show what `apply` takes."""

    method: str
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
    shift: bool | None
    auto: bool


# The paper's variants. How long plans are kept differs by family, see `make`.
AS_PUBLISHED: dict[str, Any] = {"share": "kind", "dense_blocks": 0, "interval": 1}
AS_PUBLISHED |= {"unmerge": "transpose", "shift": False}
PRESETS: dict[str, dict[str, Any]] = {
    "toma": {"regions": "tile", "assign": "global", "where": "module", **AS_PUBLISHED},
    "toma_once": {"regions": "tile", "assign": "global", "where": "block", **AS_PUBLISHED},
    "toma_tile": {"regions": "tile", "assign": "region", "where": "module", **AS_PUBLISHED},
    "toma_stripe": {"regions": "stripe", "assign": "region", "where": "module", **AS_PUBLISHED},
}


def make(
    config: Config | None,
    preset: str | None,
    settings: Mapping[str, Any],
    paper_reuse: tuple[int, int] = (1, 1),
    offers: Collection[str] = CHOICES["where"],
) -> Config:
    """The configuration that a call of `apply` asks for.

    Presets take their refreshes from `paper_reuse`. Where a model doesn't offer to merge whole blocks, and
    nothing is said, its modules are merged, or else its keys and values.
    """
    if config is not None:
        if not isinstance(config, Config):
            raise ConfigError(
                f"config must be a tomadiff.Config or the name of a settings file, not {config!r}; "
                "give single settings by keyword, as in ratio=0.5"
            )
        if preset is not None or settings:
            raise ConfigError(
                "give either a Config or a settings file, or a preset and settings by keyword, not both"
            )
        return config
    known = [field.name for field in fields(Config)]
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"unknown setting {name!r}{_guess(name, known)}; the settings are {_listed(known)}"
            )
    if preset is None:
        chosen = Config(**settings)
        if settings.get("where") is None and chosen.where == "span" and "span" not in offers:
            chosen = Config(**{**settings, "where": "module" if "module" in offers else "kv"})
        return chosen
    if preset not in PRESETS:
        raise ConfigError(
            f"unknown preset {preset!r}{_guess(preset, PRESETS)}; the presets are {_listed(PRESETS)}"
        )
    reuse = {"refresh_destinations": paper_reuse[0], "refresh_weights": paper_reuse[1]}
    return Config(**{**PRESETS[preset], **reuse, **settings})


def _numbers(ratio: Ratio) -> Collection[float]:
    return ratio.values() if isinstance(ratio, Mapping) else (ratio,)


def _plain(value: Any) -> Any:
    """With Python's numbers for numpy's, which no file of settings could hold."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(part) for key, part in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_step(value: object) -> bool:
    """A number of steps, or a share of them."""
    return _is_number(value) and value >= 0 and (not isinstance(value, float) or value < 1)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _guess(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
