"""Numbers of 16 bits. runtime/test_robustness.py runs this in a process of its own.

On CPUs that only claim to multiply in bf16, oneDNN has to be told before torch is imported.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelines import draw, every_pipeline_with, make

import tomadiff

SETTINGS: list[dict[str, Any]] = [
    {"where": "span", "weigh_keys": True},
    {"where": "module", "interval": 2},
    {"where": "kv"},
    {"unmerge": "pinv", "scale": 10.0},
    {"unmerge": "regression"},
    *({"method": method} for method in ("tome", "tofu", "todo")),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "settings"), every_pipeline_with(SETTINGS), ids=str)
def test_half_precision_is_finite_and_close(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    pipe = tomadiff.apply(make(name), ratio=0.75 if settings.get("method") == "todo" else 0.5, **settings)
    steps = 4 if "interval" in settings else 2  # the third is forecast
    call: dict[str, Any] = {"size": (48, 80), "steps": steps, "guidance": 1.0}
    full = draw(pipe, **call)
    half = draw(pipe.to(dtype), dtype=dtype, **call)
    assert half.dtype == dtype and half.isfinite().all()
    assert float((half.float() - full).norm() / full.norm()) < 0.05
