"""Models without a declared family: the user describes their merge sites with `Sites`."""

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
    """Where to merge in a model without a declared family. `tomadiff inspect` prints a line to start from.

    Attributes:
        blocks: name of the model's list of transformer blocks, such as "transformer_blocks", or several.
        tokens: the blocks' argument with the image tokens, [B, S, C].
        output: index of the image tokens in what a block returns, if it returns a tuple.
        grid: rows and columns of the tokens (for video: frames, rows and columns), or a function that
            returns them; its parameters are named after the model's arguments that it needs:
            grid=lambda hidden_states: tuple(side // 2 for side in hidden_states.shape[-2:])
        rotary: the blocks' argument with rotary tables, [S, ...] or [B, S, ...]; or `PerTokenArg`s.
        follows: other per-token arguments of the blocks, such as key masks or timesteps.
        text: "first" or "last" if text tokens are in the same sequence.
        residual: blocks return their input plus a change, as nearly all do.
        spans: nothing else acts on the tokens between consecutive blocks, so that these can share one merge.
        time: the model's argument with the timestep; None if it has none.
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
    """A family for this one model, made from `sites` after checking it against the model's signatures."""
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
    """The model's module lists whose members all have the same class, by name."""
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
    """Tables with two axes are shared by all samples; tables with more axes start with a batch axis."""
    if not isinstance(rotary, str):
        return tuple(rotary or ())
    return tuple(PerTokenArg(rotary, axis=min(ndim - 2, 1), ndim=ndim) for ndim in range(2, 8))
