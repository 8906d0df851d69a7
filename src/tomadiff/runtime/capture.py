"""CUDA graphs that somebody records around a model: what the host decides is not in them."""

from __future__ import annotations

import torch

from tomadiff.errors import ConfigError


def check_not_captured() -> None:
    """Which steps run, and when plans are made anew, is decided on the host, and would never be again."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "a CUDA graph is being recorded around tomadiff, and would replay this one step for ever: call "
            "tomadiff.remove first, or let torch.compile(mode='reduce-overhead') record what is inside, with "
            "torch 2.8 or newer"
        )
