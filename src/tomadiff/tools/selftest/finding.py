"""The result of a check of the self-test, and how long checks may take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    good: bool | None  # None for a measurement that can't fail, or if the check could not run here
    words: str  # the result as text
    figures: dict[str, Any] = field(default_factory=dict)  # the result as numbers

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "    "}[self.good]
        return f"{mark}  {self.name}: {self.words}"


Check = Callable[[torch.device], Iterator[Finding]]

LEFT_OUT = "left out: the time is over (--seconds)"
_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


def left_out(name: str) -> Finding:
    return Finding(name, None, LEFT_OUT)


def time_is_over() -> bool:
    """Whether a check must begin nothing new, but say what it leaves out."""
    return time.perf_counter() > _deadline.get()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    token = _deadline.set(time.perf_counter() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def dtypes_of(device: torch.device) -> list[torch.dtype]:
    """The dtypes to check on a device. No bf16 on CPUs: if oneDNN misdetects the CPU, it ends the process."""
    if device.type == "cpu":
        return [torch.float32]
    half = [torch.float16]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        half.append(torch.bfloat16)
    return [torch.float32, *half]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
