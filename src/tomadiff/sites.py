"""Which modules of a model become sites under a configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from .config import Config
from .errors import ConfigError, UnsupportedModelError
from .families import Block, Family, Site


@dataclass(frozen=True)
class Place:
    """A site in a model: its module and the ratio it gets."""

    site: Site
    module: nn.Module
    name: str
    block: nn.Module  # that it is in, or is
    block_name: str
    level: int
    ratio: float
    depth: float  # how far through the model it is, from 0 to 1

    @property
    def neighbours(self) -> str:
        """The list it is in: blocks of one list run one after the other."""
        return self.name.rpartition(".")[0]


def find(model: nn.Module, family: Family, config: Config) -> list[Place]:
    """Every site, in the order they run; an error where configuration and model don't fit."""
    everything = _blocks(model, family)
    blocks = _without_first(everything, config.dense_blocks)
    places = []
    for number, name, module, block in blocks:
        level = family.level(model, name)
        for site in _sites(block, config):
            # an optional part, like the second attention of some blocks, is None where it is missing
            part = getattr(module, site.path) if site.path else module
            if part is not None:
                if getattr(module, "only_cross_attention", False) and (config.weigh_keys or site.keys_only):
                    raise ConfigError(
                        f"{'where=kv' if site.keys_only else 'weigh_keys=True'} can't be honoured: "
                        f"{name} attends to the text alone"
                    )
                full_name = f"{name}.{site.path}" if site.path else name
                depth = number / len(everything)
                ratio = _ratio(config, site, level)
                places.append(Place(site, part, full_name, module, name, level, ratio, depth))
    if not blocks:
        raise UnsupportedModelError(
            f"this {type(model).__name__} has no {' or '.join(b.name for b in family.blocks)} to merge in"
            + (f" beyond the dense_blocks={config.dense_blocks}" if config.dense_blocks else "")
        )
    _check(places, family, config)
    return places


def _blocks(model: nn.Module, family: Family) -> list[tuple[str, nn.Module, Block]]:
    """All blocks, as they run."""
    declared = {block.name: block for block in family.blocks}
    blocks = [
        (name, module, declared[type(module).__name__])
        for name, module in model.named_modules()
        if type(module).__name__ in declared and not set(family.dense) & set(name.split("."))
    ]
    if family.parts:
        blocks.sort(key=lambda found: family.parts.index(found[0].partition(".")[0]))
    return blocks


def _without_first(
    blocks: list[tuple[str, nn.Module, Block]], dense: int
) -> list[tuple[int, str, nn.Module, Block]]:
    """Numbered, without the first so many of each class."""
    seen: Counter[str] = Counter()
    merged = []
    for number, (name, module, block) in enumerate(blocks):
        seen[block.name] += 1
        if seen[block.name] > dense:
            merged.append((number, name, module, block))
    return merged


def _sites(block: Block, config: Config) -> list[Site]:
    if config.where == "kv":
        return list(block.keys)
    if config.where != "module" or (block.joined and {"self", "mlp"} <= set(config.modules)):
        return [block.whole] if block.whole else []
    return [site for site in block.modules if site.kind in config.modules]


def _ratio(config: Config, site: Site, level: int) -> float:
    if not isinstance(config.ratio, Mapping):
        return config.ratio
    return config.ratio.get(site.kind, config.ratio.get(level, 0.0))


def _check(places: list[Place], family: Family, config: Config) -> None:
    if config.where not in family.offers:
        raise ConfigError(
            f"where={config.where!r} can't be honoured: {family.name} offers "
            + ", ".join(sorted(family.offers))
        )
    if not places:
        raise ConfigError(
            f"modules={config.modules!r} leaves nothing to merge: {family.name} has "
            + ", ".join(sorted({site.kind for block in family.blocks for site in block.modules}))
        )
    if isinstance(config.ratio, Mapping):
        there = {place.site.kind for place in places} | {place.level for place in places}
        missing = [key for key in config.ratio if key not in there]
        if missing:
            raise ConfigError(
                f"ratio names {', '.join(map(repr, missing))}, which this model doesn't have with "
                f"where={config.where!r}; it has {', '.join(map(repr, sorted(there, key=str)))}"
            )
    if config.weigh_keys and not any(place.site.weigh_keys for place in places):
        raise ConfigError(
            f"weigh_keys=True can't be honoured here: in {family.name}, no site of where={config.where!r}, "
            f"modules={config.modules!r} has attention over merged keys that takes a mask; leave it out"
        )
