"""What the hook has to know about an architecture, as data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


Call = dict[str, Any]  # a module's arguments by name


@dataclass(frozen=True)
class PerTokenArg:
    """An argument with an entry for each token, which goes where its token goes.

    A rotary table, a mask over keys, a timestep for each token: a merged token takes its destination's. An
    argument that has one entry for all tokens, along its axis, stays as it is.
    """

    argument: str  # "name", or "name.key" of one that is a dict
    axis: int = 0  # of the tokens; before it, where anything is, come the samples
    text_last: bool = False  # entries for the text, where there are any, follow the image's
    ndim: int | None = None  # it has them only where it has so many axes
    inside: tuple[int, ...] = ()  # which members of a tuple have them; empty for all


@dataclass(frozen=True)
class Site:
    """A module whose image tokens are merged before it runs and unmerged after."""

    kind: str
    path: str = ""  # from the block; empty for the block itself
    tokens: str | None = "hidden_states"  # the argument with the image tokens; None for the first
    text_first: bool = False  # text comes first, in the tokens and in what comes back
    text_last: bool = False  # or last
    companion_args: tuple[str, ...] = ()  # other arguments with image tokens, merged by the same plan
    outputs: tuple[int, ...] = ()  # where they come back in a tuple; empty if they are all that comes back
    residual: bool = False  # x + f(x): what is unmerged is the change
    rotary: tuple[PerTokenArg, ...] = ()  # the positions of queries and keys
    follows: tuple[PerTokenArg, ...] = ()  # what else belongs to single tokens
    first_frame: str | None = None  # the argument that tells how many tokens are the first frame's
    mask: str | None = None  # the argument that would hold a mask over image keys, which is refused
    unmasked: str = "call the model without it"  # what to do instead
    # normalises the tokens to make a plan from, where they don't come normalised
    features: Callable[[nn.Module, Call], Tensor] | None = None
    # hands a bias on the keys that come from the site's tokens, [B, S], to the call
    weigh_keys: Callable[[Call, Tensor], None] | None = None
    # of attention whose queries stay whole: where merged tokens go in for keys and values, as an argument or
    # as the input of projections; or they are merged at the very call of attention, behind projections and
    # positions, where `text_first` and `text_last` are about the keys
    keys_argument: str | None = None
    keys_projections: tuple[str, ...] = ()
    keys_inside: bool = False
    weighed_inside: bool = False  # at the call of attention, too, since it takes no mask before

    @property
    def per_token(self) -> tuple[PerTokenArg, ...]:
        return (*self.rotary, *self.follows)

    @property
    def keys_only(self) -> bool:
        return bool(self.keys_argument or self.keys_projections or self.keys_inside)

    @property
    def weighs(self) -> bool:
        """Whether keys can be weighed."""
        return self.weigh_keys is not None or self.weighed_inside or self.keys_inside


@dataclass(frozen=True)
class Block:
    """A class of transformer block: as one site, as the modules in it, and as attention over merged keys."""

    name: str
    whole: Site | None = None
    modules: tuple[Site, ...] = ()
    keys: tuple[Site, ...] = ()
    joined: bool = False  # self-attention and MLP run side by side: where both are merged, the block is one


@dataclass(frozen=True)
class Family:
    """An architecture: which blocks it has, and how to read the grid of a call."""

    name: str
    covers: str
    models: tuple[str, ...]  # class names
    blocks: tuple[Block, ...]
    grid_from: str | tuple[str, ...]  # the model's arguments that tell the grid
    grid: Callable[..., tuple[int, ...]]  # of the finest level, from the model and these arguments
    # tokens of other pictures, before and behind those of the picture, from the same arguments; never merged
    reference_tokens: Callable[..., tuple[int, int]] = lambda model, *sources: (0, 0)
    level: Callable[[nn.Module, str], int] = lambda model, block: 1  # how far a block's grid is downsampled
    drops_odd: bool = False  # downsampling leaves out the last of an odd number of rows, against the custom
    # first parts of the names of blocks, as they run, where that is not the order of the model's modules
    parts: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()  # the lists that its blocks are in, where not all such blocks are meant
    # parts of the names of blocks that stay dense, since they attend to something else: to text, or over time
    dense: tuple[str, ...] = ()
    reads: Callable[[Call], bool] = lambda call: False  # whether a call only reads a reference: it is dense
    between_blocks: tuple[str, ...] = ()  # model arguments that act between blocks: no spans with them
    skips: bool = False  # what always happens between blocks needs all tokens: no spans at all
    dimensions: str = "2-D"  # of its grids; nothing where only a call tells
    pipelines: tuple[str, ...] = ()  # that it is tested through, beside its forward
    paper_reuse: tuple[int, int] = (1, 1)  # steps the paper's presets keep destinations and weights
    time: str | None = "timestep"  # the model's argument that tells the step; None if none does
    ascending: bool = False  # which grows from noise to image, against the custom

    @property
    def axes(self) -> frozenset[int]:
        """How many its grids may have; none where only a call tells."""
        return frozenset(int(number) for number in re.findall(r"(\d)-D", self.dimensions))

    @property
    def offers(self) -> frozenset[str]:
        """The values of `where` that have a site in it."""
        offers = {"module"} if any(block.modules for block in self.blocks) else set()
        offers |= {"block", "span"} if any(block.whole for block in self.blocks) else set()
        return frozenset(offers | ({"kv"} if any(block.keys for block in self.blocks) else set()))

    def __str__(self) -> str:
        blocks = ", ".join(block.name for block in self.blocks)
        return f"{self.name}: {self.covers} ({', '.join(self.models)}; {blocks})"
