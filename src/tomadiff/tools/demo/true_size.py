"""What merging gains on the machine at hand in a transformer block of SDXL's size."""

from __future__ import annotations

import statistics
import time

import torch
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn

import tomadiff
from tomadiff.runtime.machine import out_of_memory

CHANNELS, SIDE = 1280, 32  # where 60 of SDXL's 70 blocks are, at 1024 x 1024 pixels
HEADS, TEXT_CHANNELS, TEXT_TOKENS = 20, 2048, 77
ROUNDS = 3


class OneBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = BasicTransformerBlock(CHANNELS, HEADS, CHANNELS // HEADS, cross_attention_dim=TEXT_CHANNELS)
        self.blocks = nn.ModuleList([block])

    def forward(self, hidden_states: Tensor, text: Tensor) -> Tensor:
        return self.blocks[0](hidden_states, encoder_hidden_states=text)


def speedup_of_a_block() -> str:
    """A line for the reader: times of a block, dense and on half of its tokens."""
    title = f"A transformer block of SDXL at its true size ({CHANNELS:,} channels, {SIDE**2:,} tokens)"
    try:
        dense, merged = _measure()
    except Exception as error:
        if not out_of_memory(error):
            raise
        return f"{title} does not fit in the free memory"
    speedup = statistics.median(a / b for a, b in zip(dense, merged))
    before, after = statistics.median(dense), statistics.median(merged)
    return (
        f"{title} takes {before:.2f} s on this machine, and {after:.2f} s with half of the tokens merged: "
        f"{speedup:.2f}x"
    )


@torch.no_grad()
def _measure() -> tuple[list[float], list[float]]:
    """Seconds of dense and merged calls, in turns; weights of plans are made anew in each, as by default."""
    model = OneBlock().eval()
    tokens, text = torch.randn(1, SIDE**2, CHANNELS), torch.randn(1, TEXT_TOKENS, TEXT_CHANNELS)
    sites = tomadiff.Sites("blocks", grid=(SIDE, SIDE), time=None)

    def seconds() -> float:
        model(tokens, text)  # warms up; if merged, chooses the destinations, which is done every three steps
        start = time.perf_counter()
        model(tokens, text)
        return time.perf_counter() - start

    dense, merged = [], []
    for _ in range(ROUNDS):
        dense.append(seconds())
        with tomadiff.merged(model, ratio=0.5, sites=sites):
            merged.append(seconds())
    return dense, merged
