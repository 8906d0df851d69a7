"""Refuse CUDA graphs that are recorded around a model: they can't contain the host's decisions."""

from __future__ import annotations

import torch

from tomadiff.errors import ConfigError


def check_not_captured() -> None:
    """The host decides which steps run and when plans are refreshed, which a replayed graph would not."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "a CUDA graph is being recorded around tomadiff, and would replay this one step for ever: call "
            "tomadiff.remove first, or let torch.compile(mode='reduce-overhead') record what is inside, with "
            "torch 2.8 or newer"
        )
