"""The plan of a site: the one at hand, or a new one where that is due."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tomadiff.errors import ConfigError, UnsupportedModelError
from tomadiff.methods import METHODS, lengths
from tomadiff.models import Call

from .plan_cache import KeptPlan, PlanKey
from .sequence import picture, with_image_tokens
from .sites import Place
from .state import State

BLOCK_INPUT = "block input"  # among the arguments of a module, what went into its block


class Planner:
    """Makes plans for one site, which others may share."""

    def __init__(self, state: State, place: Place, argument: str) -> None:
        self.state, self.place, self.site = state, place, place.site
        self.argument = argument  # with the site's tokens

    def plan(
        self,
        call: Call,
        tokens: Tensor,
        around: tuple[int, int],
        ratio: float,
        visit: int,
        arranged_by: KeptPlan | None,
    ) -> KeptPlan:
        """For the picture's tokens, which an earlier site of the run may have arranged by its own plan."""
        state, config, step = self.state, self.state.config, self.state.clock.step
        grid = self._grid(tokens.shape[1] if arranged_by is None else arranged_by.plan.regions.tokens)
        key = self._key(tokens, ratio, grid, visit)
        kept = state.plans.get(key)
        due = state.plans.due(kept, step)
        if kept is not None and due is None:
            return kept
        with torch.no_grad():
            with state.times.spent("plan", tokens.device):
                features = tokens if arranged_by is None else arranged_by.plan.regions.restore(tokens)
                features = self._features(call, features, around)
            with state.times.overhead("plan", tokens.device):
                plan = METHODS[config.method](
                    features,
                    grid,
                    ratio,
                    config,
                    shifted=key.shifted,
                    depth=self.place.depth,
                    destinations=kept.plan.destinations if due == "weights" else None,
                )
                key_bias = plan.log_sizes().to(tokens.dtype) if config.weigh_keys else None
        return state.plans.keep(key, plan, key_bias, step, new_weights_only=due == "weights")

    def _key(self, tokens: Tensor, ratio: float, grid: tuple[int, ...], visit: int) -> PlanKey:
        state, place = self.state, self.place
        owner = place.block_name if state.from_input else place.name
        return PlanKey(
            block=type(place.block).__name__,
            kind="block" if state.from_input else self.site.kind,
            name=None if state.config.share == "kind" else owner,
            ratio=ratio,
            grid=grid,
            shifted=state.shifted(),
            call=state.clock.call,
            visit=visit,
            batch=tokens.shape[0],
            dtype=tokens.dtype,
            device=tokens.device,
        )

    def _features(self, call: Call, tokens: Tensor, around: tuple[int, int]) -> Tensor:
        """What tokens are compared by: normalised ones, or what went into the block."""
        if self.state.from_input:
            return call[BLOCK_INPUT] if self.site.path else tokens
        if self.site.features is None:
            return tokens
        # with what is around the picture, since other arguments have entries for that, too
        sequence = with_image_tokens(call[self.argument], around, tokens)
        features = self.site.features(self.place.module, {**call, self.argument: sequence})
        return picture(features, around)

    def lengths(self, tokens: int, ratio: float) -> tuple[int, int]:
        """How many tokens a plan will keep, and in how many places they are when arranged for it."""
        return self._lengths(self._grid(tokens), ratio)

    def first_frame(self, tokens: int, ratio: float) -> int:
        """How many a plan will keep of the first frame."""
        grid, sizes = self._grid(tokens), self.state.config.region_size
        if len(grid) == 1 or (isinstance(sizes, tuple) and sizes[0] > 1):
            raise ConfigError(
                f"{self.place.name} treats the first frame apart, so that regions must lie within "
                'frames: use regions="tile", and region_size as a number'
            )
        return self._lengths((1, *grid[1:]), ratio)[0]

    def _lengths(self, grid: tuple[int, ...], ratio: float) -> tuple[int, int]:
        device = next((x.device for x in self.place.module.parameters()), torch.device("cpu"))
        key = (grid, ratio, device)
        if key not in self.state.lengths:
            self.state.lengths[key] = lengths(self.state.config, *key)
        return self.state.lengths[key]

    def _grid(self, tokens: int) -> tuple[int, ...]:
        """As regions are cut from it."""
        config = self.state.config
        if config.regions in ("stripe", "global"):
            return (tokens,)  # runs of the sequence need no grid
        grid = self.state.layout.grid(self.place.level)
        if math.prod(grid) != tokens or len(grid) == 1:
            raise UnsupportedModelError(
                f"{self.place.name} got {tokens} tokens, and the image has {' x '.join(map(str, grid))}, "
                "no grid of them: if you gave it by Sites, check it; else use "
                'method="toma" with regions="stripe", which needs none (and turn feed-forward chunking off, '
                "if it is on)"
            )
        sizes = config.region_size
        if isinstance(sizes, tuple) and len(sizes) != len(grid):
            raise ConfigError(
                f"region_size={sizes} has {len(sizes)} sizes, and tokens are on a grid of {len(grid)} axes, "
                f"{' x '.join(map(str, grid))}: give one size for each, or a single number"
            )
        return grid
