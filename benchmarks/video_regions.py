"""Which regions suit video: what merging loses of moving pictures, and what it costs, by their shape.

`python benchmarks/video_regions.py` prints the table in docs/video.md. No video model is small enough to come
with the package, so this looks at tokens, not at what a model makes of them: emoji that move before a ground
of others, cut into patches, with as much noise as in the middle of a generation. Plans are made from noisy
tokens, as in a model, and told by how much they leave of the clean ones.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from tomadiff.config import Config
from tomadiff.methods import toma
from tomadiff.runtime.machine import processor
from tomadiff.tools.demo.data import load_emoji
from tomadiff.tools.drawing import markdown

SHAPES = ((1, 8, 8), (2, 4, 8), (4, 4, 4), (2, 8, 8), (4, 8, 8), (1, 16, 16))
SPEEDS = (0, 1, 4)  # tokens by which everything moves from frame to frame
PATCH, FRAMES, SIDE = 4, 8, 32  # pixels on a token's side, frames, tokens on a frame's side
NOISE = 0.5
WAN = (21, 30, 52)  # the grid of Wan 2.1 at 832 x 480 and 81 frames
WIDTH = 1536  # of its small model


def video(speed: int, seed: int) -> Tensor:
    """Emoji that move one way, before others that move the other way: [F, 3, H, W]."""
    generator = torch.Generator().manual_seed(seed)
    emoji = load_emoji()[torch.randperm(48, generator=generator)]
    ground = torch.cat([torch.cat(list(row), dim=-1) for row in emoji[:16].unflatten(0, (4, 4))], dim=-2)
    front = emoji[16]
    frames = []
    for frame in range(FRAMES):
        shift = frame * speed * PATCH
        picture = ground.roll(shift, dims=-1)[:, : PATCH * SIDE, : PATCH * SIDE].clone()
        left = max(0, PATCH * SIDE // 2 - shift)
        picture[:, 32:96, left : left + 64] = front
        frames.append(picture)
    return torch.stack(frames)


def tokens(frames: Tensor) -> Tensor:
    """Patches in random projections, as from a patch embedding: [1, N, 128]."""
    patches = F.pixel_unshuffle(frames, PATCH).permute(0, 2, 3, 1).flatten(0, 2)
    projection = torch.randn(patches.shape[-1], 128, generator=torch.Generator().manual_seed(0))
    return (patches @ projection)[None]


def lost(shape: tuple[int, ...], ratio: float, speed: int) -> float:
    """The share of the variance of clean tokens that merging and unmerging takes away."""
    config, shares = Config(ratio=ratio, region_size=shape), []
    for seed in range(4):
        clean = tokens(video(speed, seed))
        noisy = tokens((1 - NOISE) * video(speed, seed) + NOISE * torch.randn(FRAMES, 3, 128, 128))
        plan = toma.plan(F.layer_norm(noisy, noisy.shape[-1:]), (FRAMES, SIDE, SIDE), ratio, config)
        back = plan.regions.restore(plan.unmerge(plan.merge(plan.regions.arrange(clean))))
        shares.append(float((clean - back).var() / clean.var()))
    return sum(shares) / len(shares)


def milliseconds(shape: tuple[int, ...], ratio: float, repeats: int = 3) -> tuple[float, float]:
    """Of the processor's time, to plan, and to merge and unmerge, on Wan's grid: the best of some."""
    x = torch.randn(1, WAN[0] * WAN[1] * WAN[2], WIDTH)
    config, planning, moving = Config(ratio=ratio, region_size=shape), [], []
    for _ in range(repeats):
        start = time.process_time()
        plan = toma.plan(x, WAN, ratio, config)
        planned = time.process_time()
        plan.unmerge(plan.merge(plan.regions.arrange(x)))
        planning.append(planned - start)
        moving.append(time.process_time() - planned)
    return 1000 * min(planning), 1000 * min(moving)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    columns: dict[str, list[str]] = {"region": [" x ".join(map(str, shape)) for shape in SHAPES]}
    for ratio in (0.5, 0.75):
        for speed in SPEEDS:
            name = f"{ratio:.0%} removed, {'still' if not speed else f'{speed} a frame'}"
            columns[name] = [f"{lost(shape, ratio, speed):.1%}" for shape in SHAPES]
    times = [milliseconds(shape, 0.5) for shape in SHAPES]
    columns["plan, ms"], columns["merge and unmerge, ms"] = (
        [f"{ms:.0f}" for ms in part] for part in zip(*times)
    )
    print(f"{processor('cpu')}, one thread")
    print(markdown(columns))


if __name__ == "__main__":
    main()
