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
    return wish == "1" or (x.is_cuda and _works(x.device))


@lru_cache
def _works(device: torch.device) -> bool:
    """Whether Triton is there and can launch anything on a device. If it is there and can't, that is told."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        from .launch import probe

        probe(device)
    except Exception as error:  # no C compiler, too old a GPU or a driver: everything works without, slower
        warnings.warn(f"Triton can't launch on {device}, so merging does without: {error}", stacklevel=2)
        return False
    return True
