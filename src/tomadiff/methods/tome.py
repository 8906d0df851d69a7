"""ToMe for SD: the most similar tokens join a neighbour's cell (Bolya and Hoffman 2023, arXiv 2303.17604)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tomadiff.core import exact_products, num_kept
from tomadiff.errors import ConfigError

from .method import Method, PlanSettings

CELL = 2  # tokens on the side of a cell, one of which is a destination


@dataclass(frozen=True)
class Matching:
    """Some source tokens joined a destination; the others stay as they are."""

    destinations: Tensor  # [B, K] sources that stay, then one token of each cell
    joined: Tensor  # [B, N] for each token, the index in `destinations` that it went to

    def merge(self, x: Tensor) -> Tensor:
        """The mean of all tokens that went to a destination, summed in fp32."""
        sums = torch.zeros(self.destinations.numel(), x.shape[-1], dtype=torch.float32, device=x.device)
        sums.index_add_(0, _rows(self.joined, self.destinations.shape[1]), x.flatten(0, 1).float())
        return sums.view(*self.destinations.shape, -1).div_(self.sizes()[..., None]).to(x.dtype)

    def unmerge(self, y: Tensor, onto: Tensor | None = None, merged: Tensor | None = None) -> Tensor:
        return pick(y, self.joined) if onto is None else onto + pick(y - merged, self.joined)

    def owners(self) -> Tensor:
        return self.destinations.gather(1, self.joined)

    def log_sizes(self) -> Tensor:
        return self.sizes().log()

    def sizes(self) -> Tensor:
        """[B, K] how many tokens went to each destination."""
        sizes = torch.zeros(self.destinations.shape, dtype=torch.float32, device=self.joined.device)
        return sizes.scatter_add_(1, self.joined, torch.ones_like(self.joined, dtype=sizes.dtype))


def plan(
    features: Tensor,
    grid: tuple[int, ...],
    ratio: float,
    settings: PlanSettings,
    *,
    shifted: bool = False,
    depth: float = 0.0,
    destinations: Tensor | None = None,
) -> Matching:
    return Matching(*match(features, grid, ratio, settings, shifted))


def length(grid: tuple[int, ...], ratio: float, settings: PlanSettings) -> int:
    frames, frame = math.prod(grid[:-2]), grid[-2:]
    cells, _ = _split(frame, False, torch.device("cpu"))
    return frames * max(num_kept(math.prod(frame), ratio), len(cells))


@exact_products()
def match(
    features: Tensor, grid: tuple[int, ...], ratio: float, settings: PlanSettings, shifted: bool
) -> tuple[Tensor, Tensor]:
    """Destinations, [B, K] token numbers, and the index among them that each token goes to, [B, N].

    Each source's best destination is the one of largest cosine; the sources closest to theirs join it. Which
    token of a cell is a destination is fixed, the first, or the last where `shifted`: a random one would make
    a picture depend on more than its seed. In video, that happens in each frame for itself.
    """
    if len(grid) > 2:
        frames = features.reshape(-1, math.prod(grid[-2:]), features.shape[-1])
        return _by_frame(*match(frames, grid[-2:], ratio, settings, shifted), math.prod(grid[:-2]))
    batch, tokens = features.shape[:2]
    cells, sources = _split(grid, shifted, features.device)
    if settings.shift:
        _split(grid, not shifted, features.device)
    # not below 0: on a grid that is one token wide, cells have two tokens, and half of all are destinations
    staying = max(0, num_kept(tokens, ratio) - len(cells))
    unit = F.normalize(features.float(), dim=-1)
    similarity = unit.index_select(1, sources) @ unit.index_select(1, cells).transpose(1, 2)
    closeness, nearest = similarity.max(dim=-1)
    order = closeness.argsort(dim=-1, descending=True, stable=True)
    joining, alone = order.split([len(sources) - staying, staying], dim=1)

    destinations = torch.cat([sources[alone], cells.expand(batch, -1)], dim=1)
    joined = torch.empty(batch, tokens, dtype=torch.long, device=features.device)
    joined.scatter_(
        1, destinations, torch.arange(destinations.shape[1], device=joined.device).expand(batch, -1)
    )
    joined.scatter_(1, sources[joining], nearest.gather(1, joining) + staying)
    return destinations, joined


def _by_frame(destinations: Tensor, joined: Tensor, frames: int) -> tuple[Tensor, Tensor]:
    """Matches of single frames, [B * F, ...], as matches of whole videos, [B, F * ...]."""
    number = torch.arange(len(joined), device=joined.device)[:, None] % frames
    destinations, joined = destinations + number * joined.shape[1], joined + number * destinations.shape[1]
    return destinations.reshape(len(joined) // frames, -1), joined.reshape(len(joined) // frames, -1)


def pick(x: Tensor, places: Tensor) -> Tensor:
    """Rows of each sample: [B, K, C] at [B, N] -> [B, N, C]."""
    return x.flatten(0, 1).index_select(0, _rows(places, x.shape[1])).view(*places.shape, -1)


def _rows(places: Tensor, length: int) -> Tensor:
    """Indices into each sample, [B, N], as row numbers of the flattened batch: index_select is faster."""
    first = torch.arange(0, places.shape[0] * length, length, device=places.device)
    return (places + first[:, None]).flatten()


@lru_cache(maxsize=64)
def _split(grid: tuple[int, ...], shifted: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token numbers of the destinations, one per cell, and of all others, which are sources."""
    # cached tensors outlive the call that made them, and inference tensors can't be used under autograd later
    with torch.inference_mode(False):
        index = torch.arange(math.prod(grid)).reshape(grid)
        corner = tuple(
            slice(min(side, CELL) - 1 if shifted else 0, max(CELL, side // CELL * CELL), CELL)
            for side in grid
        )
        chosen = torch.zeros(grid, dtype=torch.bool)
        chosen[corner] = True
        return index[chosen].to(device), index[~chosen].to(device)


def check_ratio(method: str, ratio: float) -> None:
    if ratio > 1 - 1 / CELL**2:
        raise ConfigError(
            f"ratio={ratio!r} is more than method={method!r} can remove: one token of each 2 x 2 cell stays, "
            "so at most 0.75"
        )


# a new matching in every block and step, around self-attention only
DEFAULTS: dict[str, Any] = {
    "ratio": 0.5,
    "where": "module",
    "modules": ("self",),
    "refresh_destinations": 1,
    "refresh_weights": 1,
    "share": "block",
    "dense_blocks": 0,
}
METHOD = Method(
    name="tome",
    plan=plan,
    length=length,
    defaults=DEFAULTS,
    check_ratio=partial(check_ratio, "tome"),
    from_block_input=True,
)
