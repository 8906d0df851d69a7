"""The plan of a site: a cached one, or a new one if a refresh is due."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from tomadiff.config import ResolvedConfig
from tomadiff.core import MergePlan
from tomadiff.errors import ConfigError, UnsupportedModelError
from tomadiff.methods import METHODS
from tomadiff.models import Call

from .layout import Layout
from .model_call import ModelCall, SiteTask
from .offloading import weights_at_hand
from .plan_cache import KeptPlan, PlanKey
from .sequence import image_tokens
from .sites import BoundSite

NOTHING = contextlib.nullcontext()
BLOCK_INPUT = "block input"  # key, among a module's arguments, of the input of its block


class Planner:
    """Makes plans for one site; other sites may share them."""

    def __init__(self, config: ResolvedConfig, bound: BoundSite) -> None:
        self.config, self.bound, self.site = config, bound, bound.site
        self.method, self.settings = METHODS[config.method], config.plan
        whole = self.method.from_block_input
        owner = bound.block_name if whole else bound.name
        self._owner = (
            type(bound.block).__name__,
            "block" if whole else bound.site.kind,
            None if config.share == "kind" else owner,
        )

    def plan(
        self,
        call: ModelCall,
        task: SiteTask,
        inputs: Call,
        tokens: Tensor,
        prefix: int,
        suffix: int,
        visit: int,
    ) -> KeptPlan:
        """The plan for the image tokens of a sequence; prefix and suffix count the tokens around them."""
        expected = tokens.shape[1] == task.tokens
        grid = task.grid if expected else self.grid(call.layout, tokens.shape[1])

        def make(destinations: Tensor | None) -> tuple[MergePlan, Tensor | None]:
            # gradients are rarely recorded, and to switch that off takes the host a while
            with torch.no_grad() if torch.is_grad_enabled() else NOTHING:
                with call.times.spent("plan", tokens.device):
                    features = self._features(inputs, tokens, prefix, suffix)
                with call.times.overhead("plan", tokens.device):
                    plan = self.method.plan(
                        features,
                        grid,
                        task.ratio,
                        self.settings,
                        shifted=call.shifted,
                        depth=self.bound.depth,
                        destinations=destinations,
                    )
                    cast = getattr(plan, "cast", None)  # only plans with matrices have it
                    plan = plan if cast is None else cast(tokens.dtype)
                    return plan, plan.log_sizes().to(tokens.dtype) if self.config.weigh_keys else None

        alike = (tokens.shape[0], tokens.dtype, tokens.device)
        key = PlanKey(*self._owner, task.ratio, grid, call.shifted, call.number, visit, *alike)
        return call.plans.get_or_make(key, call.step, make)

    def _features(self, inputs: Call, tokens: Tensor, prefix: int, suffix: int) -> Tensor:
        """The features by which tokens are compared: normalised tokens, or the input of the block."""
        if self.method.from_block_input:
            return inputs[BLOCK_INPUT] if self.site.path else tokens
        if self.site.features is None:
            return tokens
        with weights_at_hand(self.bound.module):
            features = self.site.features(self.bound.module, inputs)
        return image_tokens(features, prefix, suffix)

    def length(self, grid: tuple[int, ...], ratio: float) -> int:
        """The number of merged tokens that a plan will have."""
        return self.method.length(grid, ratio, self.settings)

    def first_frame(self, grid: tuple[int, ...], ratio: float) -> int:
        """The number of merged tokens that a plan will have in the first frame."""
        sizes = self.settings.region_size
        if len(grid) == 1 or (isinstance(sizes, tuple) and sizes[0] > 1):
            raise ConfigError(
                f"{self.bound.name} treats the first frame apart, so that regions must lie within "
                'frames: use regions="tile", and region_size as a number'
            )
        return self.method.length((1, *grid[1:]), ratio, self.settings)

    def grid(self, layout: Layout, tokens: int) -> tuple[int, ...]:
        """The grid that is divided into regions."""
        if self.settings.regions in ("stripe", "global"):
            return (tokens,)  # stripes of the sequence need no grid
        grid = layout.grid(self.bound.level)
        if math.prod(grid) != tokens or len(grid) == 1:
            raise UnsupportedModelError(
                f"{self.bound.name} got {tokens} tokens, and the image has {' x '.join(map(str, grid))}, "
                "no grid of them: if you gave it by Sites, check it; else use "
                'method="toma" with regions="stripe", which needs none (and turn feed-forward chunking off, '
                "if it is on)"
            )
        sizes = self.settings.region_size
        if isinstance(sizes, tuple) and len(sizes) != len(grid):
            raise ConfigError(
                f"region_size={sizes} has {len(sizes)} sizes, and tokens are on a grid of {len(grid)} axes, "
                f"{' x '.join(map(str, grid))}: give one size for each, or a single number"
            )
        return grid
