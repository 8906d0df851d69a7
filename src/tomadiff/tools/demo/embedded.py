"""The embedded models by name."""

from __future__ import annotations

from pathlib import Path

import torch

from .pipelines import PIPELINES, EmojiPipeline

FOLDER = Path(__file__).with_name("models")
EMBEDDED = {f"emoji-{kind}": pipeline for kind, pipeline in PIPELINES.items()}


def load_embedded(name: str, dtype: torch.dtype = torch.float32) -> EmojiPipeline:
    return EMBEDDED[name].from_pretrained(FOLDER / name.removeprefix("emoji-"), dtype=dtype)
