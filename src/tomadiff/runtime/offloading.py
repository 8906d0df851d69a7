"""Load offloaded weights before a module's forward, if a plan needs them.

Offloading loads a module's weights when its forward is called. Plans are made before that, from tokens that
pass through the block's norm and modulation, and some blocks have a modulation table as their own parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

GROUP = "group_offloading"  # diffusers' name for its hook


@contextlib.contextmanager
def weights_at_hand(module: nn.Module) -> Iterator[None]:
    """Load a module's own parameters to the device it runs on, as they are inside its forward."""
    attributes = vars(module)
    by_accelerate = attributes.get("_hf_hook")
    registry = attributes.get("_diffusers_hook")
    group = None if registry is None else registry.hooks.get(GROUP)
    if group is not None and getattr(group, "group", None) is not None:
        group.group.onload_()  # its own post_forward offloads them again
        if group.group.stream is not None:  # on which the weights are still on their way
            group.group.stream.synchronize()
    if by_accelerate is None or not any(weight.is_meta for weight in module.parameters(recurse=False)):
        yield
        return
    by_accelerate.pre_forward(module)
    try:
        yield
    finally:
        by_accelerate.post_forward(module, None)
