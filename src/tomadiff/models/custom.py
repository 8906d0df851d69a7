"""Models that nobody declared: where their tokens are, said by whoever calls `apply`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tomadiff.errors import ConfigError

from .family import Block, Call, Family, PerTokenArg, Site

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Sites:
    """Where to merge in a model of no declared family. `tomadiff inspect` writes the line to use.

    Attributes:
        blocks: the name of the model's list of transformer blocks, as in "transformer_blocks", or several.
        tokens: the blocks' argument with the image tokens, [B, S, C].
        output: where they come back, if a block returns more than these.
        grid: rows and columns of the tokens (frames, rows and columns for video), or a function that tells;
            its parameters are named like the arguments of the model that it needs:
            grid=lambda hidden_states: tuple(side // 2 for side in hidden_states.shape[-2:])
        rotary: the blocks' argument with rotary tables, [S, ...] or [B, S, ...]; or `PerTokenArg`s.
        follows: other arguments of the blocks with an entry for each token: masks over keys, timesteps.
        text: "first" or "last", if text is in the same sequence.
        residual: blocks add to their tokens, as nearly all do.
        spans: nothing happens to tokens between the blocks of a list, so that these can be merged as one.
        time: the model's argument that tells the step; None if none does.
    """

    blocks: str | tuple[str, ...]
    grid: tuple[int, ...] | Callable[..., tuple[int, ...]]
    tokens: str = "hidden_states"
    output: int = 0
    rotary: str | tuple[PerTokenArg, ...] | None = None
    follows: tuple[PerTokenArg, ...] = ()
    text: str | None = None
    residual: bool = True
    spans: bool = False
    time: str | None = "timestep"

    def __post_init__(self) -> None:
        if self.text not in (None, "first", "last"):
            raise ConfigError(f'text={self.text!r} must be "first", "last" or None')
        if not callable(self.grid) and not (
            isinstance(self.grid, (tuple, list)) and all(isinstance(side, int) for side in self.grid)
        ):
            raise ConfigError(
                f"grid={self.grid!r} must be rows and columns, as in (64, 64), or a function of the model's "
                "arguments, as in lambda hidden_states: hidden_states.shape[-2:]"
            )


def family(model: nn.Module, sites: Sites) -> Family:
    """The family of one: a declaration made from what was said, after looking whether it can be true."""
    if not isinstance(sites, Sites):
        raise ConfigError(f"sites must be tomadiff.Sites(...), not {sites!r}")
    lists = (sites.blocks,) if isinstance(sites.blocks, str) else tuple(sites.blocks)
    blocks = [block for name in lists for block in _list(model, name)]
    rotary = _rotary(sites.rotary)
    for block in {type(block): block for block in blocks}.values():
        follows = (rows.argument.partition(".")[0] for rows in (*rotary, *sites.follows))
        for argument in (sites.tokens, *follows):
            _check(argument, block, f"{type(block).__name__}, the block of {sites.blocks!r},")

    def normalised(block: nn.Module, call: Call) -> Tensor:
        import torch.nn.functional as F

        x: Tensor = call[sites.tokens]
        return F.layer_norm(x, x.shape[-1:])

    whole = Site(
        "block",
        tokens=sites.tokens,
        text_first=sites.text == "first",
        text_last=sites.text == "last",
        outputs=(sites.output,),
        residual=sites.residual,
        rotary=rotary,
        follows=sites.follows,
        features=normalised,
    )
    needed = tuple(inspect.signature(sites.grid).parameters) if callable(sites.grid) else ()
    for argument in (*needed, *([sites.time] if sites.time else [])):
        _check(argument, model, type(model).__name__)
    return Family(
        name="sites",
        covers=type(model).__name__,
        models=(type(model).__name__,),
        blocks=tuple(Block(name, whole=whole) for name in dict.fromkeys(type(b).__name__ for b in blocks)),
        grid_from=needed,
        grid=lambda model, *sources: tuple(sites.grid(*sources) if callable(sites.grid) else sites.grid),
        lists=lists,
        skips=not sites.spans,
        dimensions="",
        time=sites.time,
    )


def lists_of_blocks(model: nn.Module) -> dict[str, nn.ModuleList | nn.Sequential]:
    """The model's lists of modules that are alike, by name."""
    from torch import nn

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len({type(child) for child in module}) == 1
    }


def _list(model: nn.Module, name: str) -> Collection[nn.Module]:
    found = lists_of_blocks(model)
    if name not in found:
        there = ", ".join(
            f"{name!r} ({len(blocks)} {type(blocks[0]).__name__})" for name, blocks in found.items()
        )
        raise ConfigError(
            f"{type(model).__name__} has no list of blocks {name!r}; its lists of modules that are alike are "
            + (there or "none")
        )
    return found[name]


def _check(argument: str, module: nn.Module, who: str) -> None:
    parameters = inspect.signature(type(module).forward).parameters
    if argument not in list(parameters)[1:]:
        raise ConfigError(f"{who} has no argument {argument!r}; it takes {', '.join(list(parameters)[1:])}")


def _rotary(rotary: str | tuple[PerTokenArg, ...] | None) -> tuple[PerTokenArg, ...]:
    """Tables of two axes are for all samples; others have the samples first."""
    if not isinstance(rotary, str):
        return tuple(rotary or ())
    return tuple(PerTokenArg(rotary, axis=min(ndim - 2, 1), ndim=ndim) for ndim in range(2, 8))
