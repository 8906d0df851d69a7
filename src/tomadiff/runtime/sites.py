"""Which modules of a model become sites under a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from tomadiff.config import ResolvedConfig
from tomadiff.errors import ConfigError, UnsupportedModelError
from tomadiff.models import Block, Family, Site


@dataclass(frozen=True)
class BoundSite:
    """A site, bound to a module of one model."""

    site: Site
    module: nn.Module
    name: str
    block: nn.Module  # the block that contains the module, or is it
    block_name: str
    level: int
    depth: float  # position of the block in the model, from 0 to 1

    @property
    def list_name(self) -> str:
        """The name of the module list that it is in; blocks of a list run one after the other."""
        parts = self.name.split(".")
        number = max((i for i, part in enumerate(parts) if part.isdigit()), default=len(parts))
        return ".".join(parts[:number])


def find(model: nn.Module, family: Family, config: ResolvedConfig) -> list[BoundSite]:
    """All sites in the order of execution; raises if configuration and model don't fit together."""
    everything = _blocks(model, family)
    blocks = _without_ends(everything, config.dense_blocks, config.dense_last_blocks)
    bound = []
    for number, name, module, block in blocks:
        level = family.level(model, name)
        for site in _sites(block, config):
            # an optional submodule, such as a second attention, is None in blocks without it
            part = getattr(module, site.path) if site.path else module
            if part is not None:
                _check_declared(site, part, family)
                if getattr(module, "only_cross_attention", False) and (config.weigh_keys or site.keys_only):
                    raise ConfigError(
                        f"{'where=kv' if site.keys_only else 'weigh_keys=True'} can't be honoured: "
                        f"{name} attends to the text alone"
                    )
                full_name = f"{name}.{site.path}" if site.path else name
                depth = number / len(everything)
                bound.append(BoundSite(site, part, full_name, module, name, level, depth))
    if not blocks:
        ends = {name: getattr(config, name) for name in ("dense_blocks", "dense_last_blocks")}
        beyond = " and ".join(f"{name}={count}" for name, count in ends.items() if count)
        raise UnsupportedModelError(
            f"this {type(model).__name__} has no {' or '.join(b.name for b in family.blocks)} to merge in"
            + (f" beyond {beyond}" if beyond else "")
        )
    _check(bound, family, config)
    return bound


def _blocks(model: nn.Module, family: Family) -> list[tuple[str, nn.Module, Block]]:
    """All blocks in the order of execution."""
    declared = {block.name: block for block in family.blocks}
    blocks = [
        (name, module, declared[type(module).__name__])
        for name, module in model.named_modules()
        if type(module).__name__ in declared
        and not set(family.dense) & set(name.split("."))
        and (not family.lists or name.rpartition(".")[0] in family.lists)
    ]
    if family.parts:
        blocks.sort(key=lambda found: family.parts.index(found[0].partition(".")[0]))
    return blocks


def _without_ends(
    blocks: list[tuple[str, nn.Module, Block]], first: int, last: int
) -> list[tuple[int, str, nn.Module, Block]]:
    """Numbered blocks, without the first and the last few of each class.

    With first=1, the only block of a class is not left out: a dense first block only helps later ones.
    """
    of_class: dict[str, list[int]] = {}
    for number, (_, _, block) in enumerate(blocks):
        of_class.setdefault(block.name, []).append(number)
    inner = {
        number
        for numbers in of_class.values()
        for number in numbers[first if (first, len(numbers)) != (1, 1) else 0 : len(numbers) - last]
    }
    return [(number, *found) for number, found in enumerate(blocks) if number in inner]


def _sites(block: Block, config: ResolvedConfig) -> list[Site]:
    if config.where == "kv":
        return list(block.keys)
    if config.where != "module" or (block.joined and {"self", "mlp"} <= set(config.modules)):
        return [block.whole] if block.whole else []
    return [site for site in block.modules if site.kind in config.modules]


def _check_declared(site: Site, module: nn.Module, family: Family) -> None:
    """Raise if a family's declaration names an argument that the module doesn't take."""
    parameters = inspect.signature(type(module).forward).parameters
    names = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
    if names and site.tokens is not None and site.tokens not in names:
        raise UnsupportedModelError(
            f"{family.name} is declared with tokens={site.tokens!r} for {site.path or 'the block'}, and "
            f"{type(module).__name__} takes {', '.join(names)}: correct the declaration"
        )


def _check(bound: list[BoundSite], family: Family, config: ResolvedConfig) -> None:
    if config.where not in family.offers:
        raise ConfigError(
            f"where={config.where!r} can't be honoured: {family.name} offers "
            + ", ".join(sorted(family.offers))
            + "; give one of these"
        )
    sizes = config.plan.region_size
    tiles = config.plan.regions == "tile"  # otherwise only the product of sizes counts
    if tiles and isinstance(sizes, tuple) and family.axes and len(sizes) not in family.axes:
        raise ConfigError(
            f"region_size={sizes} has {len(sizes)} sizes, and tokens of {family.name} are on grids of "
            f"{' or '.join(map(str, sorted(family.axes)))} axes: give one size for each, or a single number"
        )
    if not bound:
        raise ConfigError(
            f"modules={config.modules!r} leaves nothing to merge: {family.name} has "
            + ", ".join(sorted({site.kind for block in family.blocks for site in block.modules}))
        )
    there = {each.site.kind for each in bound} | {each.level for each in bound}
    for ratio in (ratio for _, ratio in config.ranges() if isinstance(ratio, Mapping)):
        missing = [key for key in ratio if key not in there]
        if missing:
            raise ConfigError(
                f"ratio names {', '.join(map(repr, missing))}, which this model doesn't have with "
                f"where={config.where!r}; it has {', '.join(map(repr, sorted(there, key=str)))}"
            )
    if config.weigh_keys and not any(each.site.weighs for each in bound):
        raise ConfigError(
            f"weigh_keys=True can't be honoured here: in {family.name}, no site of where={config.where!r}, "
            f"modules={config.modules!r} has attention over merged keys that takes a mask; leave it out"
        )
