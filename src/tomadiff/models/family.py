"""Dataclasses that declare an architecture: its blocks, its merge sites and the grid of its tokens."""

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
    """An argument with one entry per token, such as a rotary table, a key mask or per-token timesteps.

    Each merged token gets its destination's entry. An argument of length 1 along its token axis applies to
    all tokens and is left unchanged.
    """

    argument: str  # the argument's name, or "name.key" if the argument is a dict
    axis: int = 0  # the token axis; if it is not the first, the first axis is the batch
    text_last: bool = False  # entries for text tokens, if any, come after those for image tokens, not before
    ndim: int | None = None  # the declaration applies only to tensors with this many axes; None: to all
    inside: tuple[int, ...] = ()  # for a tuple: indices of the members that are per token; empty: all of them


@dataclass(frozen=True)
class Site:
    """A module whose image tokens are merged before it runs and unmerged after."""

    kind: (
        str  # name of this kind of site, such as "self", "cross", "mlp" or "block"; plans are shared by kind
    )
    path: str = ""  # submodule path, relative to the block; empty for the block itself
    tokens: str | None = "hidden_states"  # the argument with the image tokens; None: the first argument
    text_first: bool = False  # input and output sequences start with the text tokens
    text_last: bool = False  # input and output sequences end with the text tokens
    companion_args: tuple[str, ...] = ()  # other arguments with image tokens, merged by the same plan
    outputs: tuple[int, ...] = ()  # indices of the image tokens in an output tuple; empty: the whole output
    residual: bool = False  # the module returns x + f(x), so the change is unmerged, not the value
    rotary: tuple[PerTokenArg, ...] = ()  # rotary tables of queries and keys
    follows: tuple[PerTokenArg, ...] = ()  # other per-token arguments
    first_frame: str | None = None  # the argument that holds the number of tokens in the first frame
    mask: str | None = None  # the argument for a mask over image keys; calls that pass one are refused
    unmasked: str = "call the model without it"  # how to avoid that mask, for the error message
    # returns normalised tokens to plan from; None where the site's input is already normalised
    features: Callable[[nn.Module, Call], Tensor] | None = None
    # adds a bias, [B, S], on the keys of this site's tokens to the arguments of the call
    weigh_keys: Callable[[Call, Tensor], None] | None = None
    # The next three are for attention in which only keys and values are merged, and queries are not.
    keys_argument: str | None = None  # the argument that takes the merged tokens for keys and values
    keys_projections: tuple[str, ...] = ()  # submodules whose input is replaced by the merged tokens
    # Merge keys and values in the scaled_dot_product_attention call, after projections and rotary positions;
    # `text_first` and `text_last` then describe the keys.
    keys_inside: bool = False
    weighed_inside: bool = False  # the key bias can be added in the scaled_dot_product_attention call

    @property
    def per_token(self) -> tuple[PerTokenArg, ...]:
        return (*self.rotary, *self.follows)

    @property
    def keys_only(self) -> bool:
        return bool(self.keys_argument or self.keys_projections or self.keys_inside)

    @property
    def weighs(self) -> bool:
        """Whether merged keys can be weighted by the number of tokens they stand for."""
        return self.weigh_keys is not None or self.weighed_inside or self.keys_inside


@dataclass(frozen=True)
class Block:
    """A class of transformer blocks, with its sites for each value of `where`."""

    name: str  # the class name
    whole: Site | None = None  # the site for where="block" and where="span"
    modules: tuple[Site, ...] = ()  # the sites for where="module"
    keys: tuple[Site, ...] = ()  # the sites for where="kv"
    # self-attention and MLP run in parallel: if both are to be merged, the whole block is merged instead
    joined: bool = False


@dataclass(frozen=True)
class Family:
    """An architecture: which blocks it has, and how to read the token grid from the model's arguments."""

    name: str
    covers: str  # the models it stands for, in words
    models: tuple[str, ...]  # class names of the denoisers
    blocks: tuple[Block, ...]
    grid_from: str | tuple[str, ...]  # the model's arguments that determine the grid
    # grid(model, *values of `grid_from`): rows and columns (or frames, rows, columns) at full resolution
    grid: Callable[..., tuple[int, ...]]
    # called like `grid`: how many tokens of reference images, never merged, come before and after the image's
    reference_tokens: Callable[..., tuple[int, int]] = lambda model, *sources: (0, 0)
    # level(model, block name): by how much that block's grid is downsampled
    level: Callable[[nn.Module, str], int] = lambda model, block: 1
    drops_odd: bool = False  # downsampling rounds odd sides down; most models round up
    # first components of block names in the order of execution, if it differs from the order of named_modules
    parts: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()  # merge only blocks in these module lists; empty: all blocks of these classes
    # blocks with one of these components in their name stay dense: they attend to text only, or over time
    dense: tuple[str, ...] = ()
    # reads(arguments): whether this call only encodes reference images; such calls run dense
    reads: Callable[[Call], bool] = lambda call: False
    # model arguments that act on all tokens between blocks: calls that pass one can't merge over spans
    between_blocks: tuple[str, ...] = ()
    skips: bool = False  # the model always needs all tokens between blocks, so spans are never possible
    dimensions: str = "2-D"  # of its grids, such as "2-D" or "3-D"; empty if only a call can tell
    pipelines: tuple[str, ...] = ()  # pipelines that it is tested with, besides its own forward
    # number of steps for which the paper's presets keep destinations and weights
    paper_reuse: tuple[int, int] = (1, 1)
    time: str | None = "timestep"  # the model's argument with the timestep; None if it has none
    ascending: bool = False  # timesteps grow from noise to image; in most models they fall
    # 1: the pipeline hands the output on to its scheduler; -1: it negates it; 0: it does something else to it
    output_sign: int = 1

    @property
    def axes(self) -> frozenset[int]:
        """The numbers of axes that its grids may have; empty if only a call can tell."""
        return frozenset(int(number) for number in re.findall(r"(\d)-D", self.dimensions))

    @property
    def offers(self) -> frozenset[str]:
        """The values of `where` for which some block has a site."""
        offers = {"module"} if any(block.modules for block in self.blocks) else set()
        offers |= {"block", "span"} if any(block.whole for block in self.blocks) else set()
        return frozenset(offers | ({"kv"} if any(block.keys for block in self.blocks) else set()))

    def __str__(self) -> str:
        blocks = ", ".join(block.name for block in self.blocks)
        return f"{self.name}: {self.covers} ({', '.join(self.models)}; {blocks})"
