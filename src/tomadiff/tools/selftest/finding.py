"""The result of a check of the self-test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
