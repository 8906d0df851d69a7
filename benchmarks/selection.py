"""The loop that chooses destinations, on the CPU, against the one that one would write first.

python benchmarks/selection.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tomadiff.core import facility_location, similarity, unit_vectors
from tomadiff.runtime.machine import processor


class Size(NamedTuple):
    """Regions with so many tokens each, half of which are picked."""

    label: str
    regions: int
    tokens: int


SIZES = (
    Size("SDXL, 64 x 64 tokens, two samples", 128, 64),
    Size("SDXL, 32 x 32 tokens, two samples", 32, 64),
    Size("Flux.1 and SD3, 64 x 64 tokens", 64, 64),
    Size("SDXL, 32 x 32 tokens", 16, 64),
    Size("1920 x 1080: 68 x 120 tokens in tiles of 8 x 8", 135, 64),
    Size("64 x 64 tokens, region_size=16", 16, 256),
    Size('32 x 32 tokens, regions="global"', 1, 1024),
)


def plain(similarity: Tensor, k: int) -> Tensor:
    """Greedy facility location as it is written down: [G, n, n] -> [G, k]."""
    regions = torch.arange(len(similarity))
    nearest = torch.full_like(similarity[:, 0], -1.0)
    chosen = torch.zeros_like(nearest, dtype=torch.bool)
    picks = []
    for _ in range(k):
        gains = torch.relu(similarity - nearest[:, None]).sum(-1).masked_fill(chosen, -1.0)
        picks.append(gains.argmax(-1))
        chosen[regions, picks[-1]] = True
        nearest = torch.maximum(nearest, similarity[regions, picks[-1]])
    return torch.stack(picks, dim=1)


def smooth(size: Size) -> Tensor:
    """Similarities of made-up tokens on square grids, each like its neighbours: [G, n, n]."""
    side = round(size.tokens**0.5)
    noise = torch.randn(size.regions, 64, side, side, generator=torch.Generator().manual_seed(0))
    tokens = F.avg_pool2d(F.pad(noise, (2, 2, 2, 2), mode="circular"), 5, stride=1)
    return similarity(unit_vectors(tokens.flatten(2).transpose(1, 2)))


def measure(size: Size, rounds: int) -> tuple[float, float, float]:
    """Medians of the plain loop's and our seconds, and of how often ours fits into the plain one's."""
    contenders, pairs = (plain, facility_location), []
    known = smooth(size)
    for number in range(-1, rounds):  # the first is to warm up
        seconds = {}
        for choose in contenders[:: 1 if number % 2 else -1]:
            start = time.process_time()
            choose(known, size.tokens // 2)
            seconds[choose] = time.process_time() - start
        pairs.append([seconds[choose] for choose in contenders])
    slow, fast = zip(*pairs[1:])
    return statistics.median(slow), statistics.median(fast), statistics.median(a / b for a, b in pairs[1:])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python benchmarks/selection.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="in each, both take a turn (default: 30)")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} must be at least 1")
    torch.set_num_threads(1)
    print(f"CPU time of one thread, medians of {args.rounds} rounds, {processor('cpu')}:\n")
    print("| regions | of tokens | as in | plain loop | tomadiff | faster |\n|--:|--:|---|--:|--:|--:|")
    for size in SIZES:
        slow, fast, ratio = measure(size, args.rounds)
        figures = f"{1000 * slow:.1f} ms | {1000 * fast:.1f} ms | {ratio:.1f}x"
        print(f"| {size.regions} | {size.tokens} | {size.label} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
