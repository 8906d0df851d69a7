"""The embedded models by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .pipelines import PIPELINES, EmojiPipeline

FOLDER = Path(__file__).with_name("models")
EMBEDDED = {f"emoji-{kind}": pipeline for kind, pipeline in PIPELINES.items()}
# Settings of merging at which both keep their images: the small Flux works out in its first blocks what is
# where, and draws noise if these are merged.
MERGING: dict[str, Any] = {"ratio": 0.5, "dense_blocks": 2}


def load_embedded(name: str, dtype: torch.dtype = torch.float32) -> EmojiPipeline:
    return EMBEDDED[name].from_pretrained(FOLDER / name.removeprefix("emoji-"), dtype=dtype)
