"""Which regions suit video: what merging loses of moving pictures, and what it costs, by their shape.

`python benchmarks/video_regions.py` prints the table in docs/video.md. No video model is small enough to come
with the package, so this looks at tokens, not at what a model makes of them: emoji that move before a ground
of others, cut into patches, with as much noise as in the middle of a generation. Plans are made from noisy
tokens, as in a model, and told by how much they leave of the clean ones.

`python benchmarks/video_regions.py --videos bikes.mp4 ...` does the same with real videos, for keys and
values: what attention over merged and weighed ones loses. It needs PyAV (`pip install av`).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from emoji import load_emoji
from torch import Tensor

from tomadiff.methods import PlanSettings, toma
from tomadiff.runtime.machine import processor
from tomadiff.tools.drawing import markdown

SHAPES = ((1, 8, 8), (2, 4, 8), (4, 4, 4), (2, 8, 8), (4, 8, 8), (1, 16, 16))
SPEEDS = (0, 1, 4)  # tokens by which everything moves from frame to frame
PATCH, FRAMES, SIDE = 4, 8, 32  # pixels on a token's side, frames, tokens on a frame's side
NOISE = 0.5
WAN = (21, 30, 52)  # the grid of Wan 2.1 at 832 x 480 and 81 frames
WIDTH = 1536  # of its small model
# a token of Wan 2.1 is of 16 x 16 pixels and 4 frames
REAL_PATCH, REAL_FRAMES = 16, 4
LATENT_FRAMES = 12  # of a real video that are looked at
SHARPNESS = 8.0  # of attention: the logits of equal tokens are so much above those of unrelated ones


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


def real_tokens(file: Path, noise: float) -> tuple[Tensor, tuple[int, ...]]:
    """Patches of a video in random projections, [1, N, 128], and their grid."""
    import av

    with av.open(str(file)) as container:
        decoded = itertools.islice(container.decode(video=0), LATENT_FRAMES * REAL_FRAMES)
        pictures = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in decoded]
    height, width = (min(side, 480) // REAL_PATCH * REAL_PATCH for side in pictures[0].shape[:2])
    video = torch.stack([picture[:height, :width].permute(2, 0, 1) for picture in pictures])
    video = video[: len(video) // REAL_FRAMES * REAL_FRAMES].float() / 127.5 - 1  # [F, 3, H, W]
    grid = (len(video) // REAL_FRAMES, height // REAL_PATCH, width // REAL_PATCH)
    video = (1 - noise) * video + noise * torch.randn(video.shape, generator=torch.Generator().manual_seed(0))
    # most of a video is smooth, and so are latents: fine texture counts less
    video = F.avg_pool2d(video, 4)
    patches = F.pixel_unshuffle(video, REAL_PATCH // 4).unflatten(0, (-1, REAL_FRAMES)).permute(0, 3, 4, 1, 2)
    patches = patches.flatten(3).flatten(0, 2)
    projection = torch.randn(patches.shape[-1], 128, generator=torch.Generator().manual_seed(0))
    return F.layer_norm(patches @ projection, (128,))[None], grid


def attention_error(file: Path, shape: tuple[int, ...], ratio: float) -> float:
    """Of attention over merged and weighed keys and values to that over all, relative."""
    x, grid = real_tokens(file, NOISE)
    print(f"{file.stem}, {' x '.join(map(str, grid))} tokens, regions of {shape}", file=sys.stderr)
    config = PlanSettings(region_size=shape)
    plan = toma.plan(x, grid, ratio, config)
    short = plan.merge(x)
    scale = SHARPNESS / x.shape[-1]
    x, short, bias = x[:, None], short[:, None], plan.log_sizes()[:, None, None]  # one head
    dense = F.scaled_dot_product_attention(x, x, x, scale=scale)
    merged = F.scaled_dot_product_attention(x, short, short, bias, scale=scale)
    return float((merged - dense).norm() / (dense - dense.mean(2, keepdim=True)).norm())


def lost(shape: tuple[int, ...], ratio: float, speed: int) -> float:
    """The share of the variance of clean tokens that merging and unmerging takes away."""
    config, shares = PlanSettings(region_size=shape), []
    for seed in range(4):
        clean = tokens(video(speed, seed))
        noisy = tokens((1 - NOISE) * video(speed, seed) + NOISE * torch.randn(FRAMES, 3, 128, 128))
        plan = toma.plan(F.layer_norm(noisy, noisy.shape[-1:]), (FRAMES, SIDE, SIDE), ratio, config)
        back = plan.unmerge(plan.merge(clean))
        shares.append(float((clean - back).var() / clean.var()))
    return sum(shares) / len(shares)


def milliseconds(shape: tuple[int, ...], ratio: float, repeats: int = 3) -> tuple[float, float]:
    """Of the processor's time, to plan, and to merge and unmerge, on Wan's grid: the best of some."""
    x = torch.randn(1, WAN[0] * WAN[1] * WAN[2], WIDTH)
    config, planning, moving = PlanSettings(region_size=shape), [], []
    for _ in range(repeats):
        start = time.process_time()
        plan = toma.plan(x, WAN, ratio, config)
        planned = time.process_time()
        plan.unmerge(plan.merge(x))
        planning.append(planned - start)
        moving.append(time.process_time() - planned)
    return 1000 * min(planning), 1000 * min(moving)


def of_real_videos(files: list[Path]) -> None:
    columns: dict[str, list[str]] = {"region": [" x ".join(map(str, shape)) for shape in SHAPES]}
    for ratio in (0.75, 0.9):
        for file in files:
            errors = [attention_error(file, shape, ratio) for shape in SHAPES]
            columns[f"{ratio:.0%} removed, {file.stem}"] = [f"{error:.1%}" for error in errors]
    print(markdown(columns))


def main() -> None:
    parser = argparse.ArgumentParser("python benchmarks/video_regions.py", description=__doc__)
    parser.add_argument("--videos", nargs="+", type=Path, default=[])
    args = parser.parse_args()
    if args.videos:
        of_real_videos(args.videos)
        return
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
