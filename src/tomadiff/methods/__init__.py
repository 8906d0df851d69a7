"""Token reduction methods. Each is a function that makes a plan from the features of image tokens:

plan(features [B, N, C], grid, ratio, config, *, shifted, depth, destinations) -> Reduction

`depth` tells how far through the model the site is, from 0 to 1; given `destinations` [B, K], these are kept.
"""

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

__all__ = ["FROM_BLOCK_INPUT", "METHODS"]
