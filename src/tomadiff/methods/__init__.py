"""Token reduction methods. Each is a function from a block's features to a plan that merges and unmerges."""

from . import ideal, toma

METHODS = {"toma": toma.plan, "ideal": ideal.plan}

__all__ = ["METHODS"]
