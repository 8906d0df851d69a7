"""Token reduction methods. Each is a function that makes a plan from the features of image tokens:

plan(features [B, N, C], grid, ratio, config, *, shifted, depth, destinations) -> MergePlan

`depth` tells how far through the model the site is, from 0 to 1; given `destinations` [B, K], these are kept.
"""

import math

import torch

from tomadiff.config import Config

from . import ideal, todo, tofu, toma, tome

# made once a block, from what goes into it, not from what its modules get
FROM_BLOCK_INPUT = ("tome", "tofu")
METHODS = {
    "toma": toma.plan,
    "tome": tome.plan,
    "tofu": tofu.plan,
    "todo": todo.plan,
    "ideal": ideal.plan,
}


# how many tokens the plans of those that have no regions keep
LENGTHS = {"tome": tome.length, "tofu": tome.length, "todo": todo.length, "ideal": ideal.length}


def lengths(config: Config, grid: tuple[int, ...], ratio: float, device: torch.device) -> tuple[int, int]:
    """How many tokens plans keep, and in how many places tokens are when arranged for them."""
    tokens = math.prod(grid)
    if len(grid) == 1 and config.method != "ideal" and config.regions not in ("stripe", "global"):
        return tokens, tokens  # and no plan: these need a grid
    if config.method == "toma":
        return toma.lengths(grid, ratio, config, device)
    return LENGTHS[config.method](grid, ratio, config), tokens


__all__ = ["FROM_BLOCK_INPUT", "METHODS", "lengths"]
