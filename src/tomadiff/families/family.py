"""What the hook has to know about an architecture, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Call = dict[str, Any]  # a module's arguments by name


@dataclass(frozen=True)
class Site:
    """A module whose image tokens are merged before it runs and unmerged after."""

    kind: str
    path: str = ""  # from the block; empty for the block itself
    tokens: str = "hidden_states"  # the argument with the image tokens
    outputs: tuple[int, ...] = ()  # where they come back in a tuple; empty if they are all that comes back
    residual: bool = False  # x + f(x): what is unmerged is the change
    rotary: str | None = None  # the argument with the rotary tables, with rows for the text first
    mask: str | None = None  # the argument that would hold a mask over image keys
    # normalises the tokens to make a plan from, where they don't come normalised
    features: Callable[[nn.Module, Call], Tensor] | None = None
    # hands a bias on the image keys, [B, K], to the call
    weigh_keys: Callable[[Call, Tensor], None] | None = None


@dataclass(frozen=True)
class Block:
    """A class of transformer block: as one site, and as the modules in it."""

    name: str
    whole: Site
    modules: tuple[Site, ...]


@dataclass(frozen=True)
class Family:
    """An architecture: which blocks it has, and how to read the grid of a call."""

    name: str
    covers: str
    models: tuple[str, ...]  # class names
    blocks: tuple[Block, ...]
    grid_from: str  # the model's argument that tells the grid
    grid: Callable[[nn.Module, Any], tuple[int, ...]]  # of the finest level, from that argument
    level: Callable[[nn.Module, str], int] = lambda model, block: 1  # how far a block's grid is downsampled
    between_blocks: tuple[str, ...] = ()  # model arguments that act between blocks: no spans with them
    paper_reuse: tuple[int, int] = (1, 1)  # steps the paper's presets keep destinations and weights

    def __str__(self) -> str:
        blocks = ", ".join(block.name for block in self.blocks)
        return f"{self.name}: {self.covers} ({', '.join(self.models)}; {blocks})"
