"""Triton twins of core's hot loops, for GPUs, where many small launches cost more than the work in them.

`select` chooses destinations in one launch, `merge` merges in one and unmerges in one, and `plan` is core's
plan on top of them. Triton itself is imported with these, not with this package.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import lru_cache

import torch
from torch import Tensor

from tomadiff.errors import ConfigError

LARGEST = 256  # tokens in a region that one program can hold; larger ones are core's
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def usable(x: Tensor, region: int) -> bool:
    """Whether kernels are to work on this tensor, in regions of so many tokens.

    That is, on CUDA if Triton works there. TOMADIFF_KERNELS=0 means never, and 1 means on any tensor: in
    Triton's interpreter kernels run on the CPU.
    """
    wish = os.environ.get("TOMADIFF_KERNELS", "auto")
    if wish not in ("auto", "0", "1"):
        raise ConfigError(f"TOMADIFF_KERNELS={wish!r} must be auto, 0 or 1")
    if wish == "0" or region > LARGEST or x.dtype not in DTYPES:
        return False
    if wish == "1" and not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"TOMADIFF_KERNELS=1 can't be honoured on {x.device}: kernels run on CUDA (and, with "
            "TRITON_INTERPRET=1, very slowly elsewhere); leave it out"
        )
    return wish == "1" or (x.is_cuda and works(x.device, x.dtype))


@lru_cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton is there, and the kernels do on a device what core does; if not, that is told, once."""
    if importlib.util.find_spec("triton") is None:
        return False
    kind = str(dtype).removeprefix("torch.")
    try:
        from .probe import difference

        wrong = difference(device, dtype)
    except Exception as error:  # no C compiler, a GPU that is too old for a type, a driver
        wrong = f"can't run: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}"
    if wrong is not None:
        warnings.warn(
            f"Triton kernels in {kind} on {device} {wrong}. Merging does without them, slower", stacklevel=2
        )
    return wrong is None
