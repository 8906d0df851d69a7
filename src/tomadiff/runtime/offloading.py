"""Weights that are elsewhere between calls: brought to where they are needed, also when we need them first.

Offloading brings a module's weights when its forward is called. Plans are made before that, from tokens that
the block's own norm and modulation prepared, and some blocks hold a table for these beside their layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

GROUP = "group_offloading"  # diffusers' name for its hook


@contextlib.contextmanager
def weights_at_hand(module: nn.Module) -> Iterator[None]:
    """A module's own weights are on the device that it runs on, as inside its forward."""
    attributes = vars(module)
    by_accelerate = attributes.get("_hf_hook")
    registry = attributes.get("_diffusers_hook")
    group = None if registry is None else registry.hooks.get(GROUP)
    if group is not None and getattr(group, "group", None) is not None:
        group.group.onload_()  # its own post_forward puts them away again
    if by_accelerate is None or not any(weight.is_meta for weight in module.parameters(recurse=False)):
        yield
        return
    by_accelerate.pre_forward(module)
    try:
        yield
    finally:
        by_accelerate.post_forward(module, None)
