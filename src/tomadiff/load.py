"""A pipeline by name."""

from __future__ import annotations

import torch
from diffusers import DiffusionPipeline

from .demo.embedded import EMBEDDED, load_embedded

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"can't use device {device!r} here: {reason}") from error


def load(model: str, device: str = "cpu", dtype: str = "fp32") -> DiffusionPipeline:
    """An embedded model by its name, or any pipeline by hub id or folder."""
    check_device(device)
    if model in EMBEDDED:
        return load_embedded(model, DTYPES[dtype]).to(device)
    try:
        return DiffusionPipeline.from_pretrained(model, dtype=DTYPES[dtype]).to(device)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"can't load {model!r}: {reason} (known by name are {', '.join(EMBEDDED)}; "
            "anything else must be the folder of a pipeline, or a hub id within reach)"
        ) from error
