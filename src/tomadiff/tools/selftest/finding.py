"""What a check of the self-test found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Finding:
    """In words; `good` is None where nothing is right or wrong about it, or where it could not be tried."""

    name: str
    good: bool | None
    words: str
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "    "}[self.good]
        return f"{mark}  {self.name}: {self.words}"


Check = Callable[[torch.device], Iterator[Finding]]


def dtypes_of(device: torch.device) -> list[torch.dtype]:
    """Those that a device computes in. bf16 on CPUs may end the process, where a library mistakes them."""
    if device.type == "cpu":
        return [torch.float32]
    half = [torch.float16]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        half.append(torch.bfloat16)
    return [torch.float32, *half]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
