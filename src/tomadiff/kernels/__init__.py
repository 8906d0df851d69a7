"""Triton versions of core's hot loops, for GPUs, where many small launches cost more than the work itself.

`select` chooses destinations in one launch, `weights` makes a plan's matrices in one, `merge` merges in one
and unmerges in another, and `plan` is core's plan on top of them. Importing this package does not import
Triton; importing those modules does.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import lru_cache

import torch
from torch import Tensor

from tomadiff.errors import ConfigError, reason

# Tokens in the largest region that one Triton program can hold, and in the largest one whose matrices it can
# make; and the most destinations whose regression it can solve in registers. core does whatever is larger.
LARGEST, LARGEST_WEIGHED, LARGEST_SOLVED = 256, 128, 64
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def usable(x: Tensor, size: int, kept: int, regression: bool | None = None) -> bool:
    """Whether to use the kernels for this tensor, in regions of `size` tokens that keep up to `kept` of them.

    regression: whether weights for unmerging are made by regression, or None if core makes all weights.

    By default they are used on CUDA, if Triton works there. TOMADIFF_KERNELS=0 turns them off, and 1 forces
    them on any device: with Triton's interpreter, they run on the CPU.
    """
    mode = os.environ.get("TOMADIFF_KERNELS", "auto")
    if mode not in ("auto", "0", "1"):
        raise ConfigError(f"TOMADIFF_KERNELS={mode!r} must be auto, 0 or 1")
    if mode == "0" or size > LARGEST or x.dtype not in DTYPES:
        return False
    if mode == "1" and not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"TOMADIFF_KERNELS=1 can't be honoured on {x.device}: kernels run on CUDA (and, with "
            "TRITON_INTERPRET=1, very slowly elsewhere); leave it out"
        )
    return mode == "1" or (x.is_cuda and works(x.device, x.dtype, block(size), block(kept), regression))


def block(size: int) -> int:
    """The block size for this many elements: a power of two, at least 16 as tensor cores require."""
    return max(16, 1 << (size - 1).bit_length())


@lru_cache
def works(
    device: torch.device, dtype: torch.dtype, places: int, slots: int, regression: bool | None = None
) -> bool:
    """Whether Triton is installed and the kernels agree with core on a device; warns once if they don't.

    places, slots: the block sizes of a region and of what it keeps. With each pair, and with `regression` or
    without, kernels are other programs, which may not fit where others do.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    kind = str(dtype).removeprefix("torch.")
    try:
        from .probe import difference, example

        wrong = difference(device, dtype, *example(places, slots), regression=regression)
    except Exception as error:  # for example no C compiler, a dtype that the GPU lacks, or an old driver
        wrong = f"can't run: {reason(error)}"
    if wrong is not None:
        warnings.warn(
            f"Triton kernels in {kind} on {device} {wrong}. Merging up to {places} tokens of a region into "
            f"up to {slots} does without them, slower",
            stacklevel=2,
        )
    return wrong is None
