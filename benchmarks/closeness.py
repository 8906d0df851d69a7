"""Closeness to the dense picture against work: the tables of docs/quality.md and docs/long_sequences.md.

python benchmarks/closeness.py emoji-flux --steps 24 --out closeness.jsonl
python benchmarks/closeness.py emoji-flux --steps 8 --scheduler stochastic --few --out closeness.jsonl
python benchmarks/closeness.py emoji-unet --steps 50 --placement --prompts 4 --out closeness.jsonl
python benchmarks/closeness.py emoji-unet --steps 16 --prompts 4 --size 256 --keys --guidance 1 --out c.jsonl
python benchmarks/closeness.py emoji-flux --steps 12 --prompts 4 --size 256 --keys --squeeze --out c.jsonl

Unlike `tomadiff eval`, which compares the PNGs that it writes, this compares pictures as the pipeline makes
them, in floating point: two PNGs of nearly the same picture are never closer than 56 dB. What is in the file
is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tomadiff.tools.demo.embedded import EMBEDDED, load_embedded
from tomadiff.tools.demo.prompts import PROMPTS
from tomadiff.tools.denoiser_flops import counted
from tomadiff.tools.drawing import markdown
from tomadiff.tools.evaluate.summary import pareto_plot
from tomadiff.tools.method_spec import calibrate, label, steps_of, switched_on
from tomadiff.tools.samplers import scheduler_by_name

BATCH = 8
KNOWN = 128  # pixels on a side of the pictures that the models were trained on
INTERVALS = (2, 3, 4, 6)
OURS = ["tomadiff:interval=1,ratio=0", "auto", *(f"tomadiff:interval={every}" for every in INTERVALS)]
FLUX = [f"first-block:threshold={threshold}" for threshold in (0.1, 0.15, 0.3)]
FLUX += [f"taylorseer:cache_interval={every}" for every in (2, 3, 4)]
FLUX += [f"magcache:threshold={threshold}" for threshold in (0.03, 0.06, 0.12)]
FLUX += [  # with one first block, since it has six in all
    f"dbcache:Fn_compute_blocks=1,residual_diff_threshold={threshold}{more}"
    for more in ("", ",taylorseer=True")
    for threshold in (0.08, 0.16, 0.32)
]
UNET = [f"deepcache:interval={every}" for every in (2, 3, 5)]
MERGED = [f"tomadiff:ratio={ratio}" for ratio in (0.25, 0.5, 0.75)]
MERGED += [f"tomadiff:ratio=[(0,{ratio}),(0.5,0)]" for ratio in (0.5, 0.75)]  # in the first half of the steps
# plans kept for longer and plain unmerging, as in the paper; and closer at the price of more planning
MERGED += ["tomadiff:ratio=0.5,refresh_weights=6,unmerge=transpose"]
MERGED += ["tomadiff:ratio=0.5,dense_blocks=2", "tomadiff:ratio=0.5,region_size=16"]
MERGED += ["tomadiff:ratio=0.5,refresh_destinations=1,shift=True,weigh_keys=True"]
MERGED += [f"tomadiff:ratio={ratio},where=kv,weigh_keys=True" for ratio in (0.5, 0.75)]

KEYS = "where=kv,weigh_keys=True"
MERGED_KEYS = [f"tomadiff:ratio={ratio},{KEYS}" for ratio in (0.5, 0.75, 0.9)]
MERGED_KEYS += [f"tomadiff:ratio={ratio},{KEYS},dense_blocks=0" for ratio in (0.75, 0.9)]
MERGED_KEYS += [f"tomadiff:ratio=0.75,{KEYS},share=kind", "tomadiff:ratio=0.75,where=kv"]
MERGED_KEYS += ["tomadiff:method=todo,ratio=0.75", "tomadiff:ratio=0.5"]
MERGED_KEYS += [f"tomadiff:interval=2,ratio={ratio},{KEYS}" for ratio in (0.5, 0.75, 0.9)]
MERGED_KEYS += [f"tomadiff:interval=2,ratio=[(0,{ratio}),(0.5,0)],{KEYS}" for ratio in (0.5, 0.75)]
MERGED_KEYS += ["tomadiff:interval=2,ratio=0.75,where=kv", "tomadiff:interval=2,method=todo,ratio=0.75"]
MERGED_KEYS += ["tomadiff:interval=2,method=todo,ratio=[(0,0.75),(0.5,0)]"]
MERGED_KEYS += [f"tomadiff:interval={every}" for every in (2, 3, 4)] + ["auto"]

# merging methods, and what single settings change in ours at ratio 0.5
METHODS = ["tomadiff", "tome", "tofu"]
CHANGES = ["dense_blocks=0", "dense_blocks=2", "unmerge=transpose", "unmerge=transpose,refresh_weights=6"]
CHANGES += ["refresh_weights=2", "refresh_destinations=1", "refresh_destinations=6", "shift=True"]
CHANGES += ["weigh_keys=True", "share=kind", "where=block", "where=module", "regions=stripe"]
CHANGES += ["region_size=4", "region_size=8", "region_size=16"]

TABLES = {  # beside the usual one, of methods for deterministic sampling
    "few": "methods for few steps and stochastic sampling",
    "merging": "merging methods, and settings of ours",
    "keys": "methods that merge keys and values",
    "placement": "steps that run, evenly spaced or counted back from the last two",
    "rule": "what apply(pipe) does, as many steps of the same sampler, and half of the tokens merged",
}


def contenders(model: str, steps: int, table: str | None) -> list[tuple[str, float]]:
    if table == "merging":
        methods = METHODS if model == "emoji-flux" else [*METHODS, "tomesd"]
        others = ["toma", "toma_tile", *(f"tomadiff:{change}" for change in CHANGES)]
        ratios = [(method, ratio) for ratio in (0.25, 0.5, 0.75) for method in methods]
        return [*ratios, ("todo", 0.75), *((method, 0.5) for method in others)]
    if table == "keys":
        return [(method, 0.0) for method in MERGED_KEYS]
    if table == "placement":
        intervals = [each for every in (2, 3, 4) for each in (every, counted_back(steps, every))]
        return [(f"tomadiff:interval={interval}", 0.0) for interval in intervals]
    if table == "rule":
        runs = len(counted_back(steps, 3 if steps >= 40 else 2))
        return [("auto", 0.0), (f"steps:{runs}", 0.0), ("tomadiff", 0.5)]
    if table == "few":
        rivals = [f"steps:{count}" for count in {max(steps // 2, 1), steps * 5 // 8, steps * 3 // 4}]
        return [(method, 0.0) for method in ("auto", "tomadiff:interval=2", *MERGED, *rivals)]
    runs = [len(counted_back(steps, every)) for every in INTERVALS]  # as many as run with an interval
    rivals = [f"steps:{count}{solver}" for solver in ("", ",solver=dpm++") for count in runs]
    rivals += FLUX if model == "emoji-flux" else UNET
    merging = ["tomadiff"] if model == "emoji-flux" else ["tomadiff", "tomesd"]
    merged = [(method, ratio) for method in merging for ratio in (0.25, 0.5, 0.75)]
    return [*((method, 0.0) for method in (*OURS, *rivals)), *merged]


def counted_back(steps: int, every: int) -> list[int]:
    """The last two steps, every so many before them, and the first."""
    return sorted({0, steps - 1, *range(steps - 2, -1, -every)})


class ImageGenerator:
    """Pictures of a model's prompts, [B, 3, H, W] in [0, 1], by any method."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.pipe = load_embedded(args.model)
        self.pipe.set_progress_bar_config(disable=True)
        if args.scheduler:
            self.pipe.scheduler = scheduler_by_name(args.scheduler, self.pipe.scheduler)
        self.steps, self.guidance, self.size = args.steps, args.guidance, args.size
        if args.squeeze:
            squeeze(self.pipe.transformer.pos_embed, KNOWN / args.size)
        self.prompts = list(PROMPTS)[:: len(PROMPTS) // args.prompts][: args.prompts]

    def draw(self, steps: int, prompts: list[str]) -> Tensor:
        generators = [torch.Generator().manual_seed(PROMPTS.index(prompt)) for prompt in prompts]
        torch.manual_seed(0)  # stochastic samplers of the pipelines draw from here
        call: dict[str, Any] = {"num_inference_steps": steps, "guidance_scale": self.guidance}
        call |= {"height": self.size, "width": self.size}
        return self.pipe(prompts, generator=generators, output_type="pt", **call).images

    def all(self, method: str, ratio: float) -> tuple[Tensor, int, float]:
        """Of all prompts, the FLOPs of one, and the processor's seconds for one."""
        steps = steps_of(method) or self.steps
        calibrate(self.pipe, method, lambda: self.draw(self.steps, self.prompts[:1]))
        pictures, began = [], time.process_time()
        for start in range(0, len(self.prompts), BATCH):
            with switched_on(self.pipe, method, ratio):
                pictures.append(self.draw(steps, self.prompts[start : start + BATCH]))
        seconds = (time.process_time() - began) / len(self.prompts)
        with switched_on(self.pipe, method, ratio):
            if method == "auto":  # what it measures once doesn't count
                self.draw(steps, self.prompts[:1])
            with counted(self.pipe) as work:
                self.draw(steps, self.prompts[:1])
        return torch.cat(pictures), work.flops, seconds


def squeeze(positions: nn.Module, scale: float) -> None:
    """Scale positions, so that those of a larger picture lie between those that the model was trained on."""
    forward = positions.forward
    positions.forward = lambda ids: forward(ids.float() * scale)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    return -10 * (a - b).square().flatten(1).mean(1).log10()


def main() -> None:
    parser = argparse.ArgumentParser("python benchmarks/closeness.py", description=__doc__)
    parser.add_argument("model", choices=list(EMBEDDED))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--guidance", type=float, help="default: the model's own, 2; 1 is none")
    parser.add_argument("--scheduler", help="as in tomadiff eval")
    tables = parser.add_mutually_exclusive_group()
    for name, about in TABLES.items():
        tables.add_argument(f"--{name}", dest="table", action="store_const", const=name, help=about)
    parser.add_argument("--size", type=int, default=KNOWN, help="pixels on a side; the models know 128")
    parser.add_argument("--squeeze", action="store_true", help="positions of Flux into those that it knows")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="evenly spaced ones of all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("closeness.jsonl"))
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw closeness against work and speed")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    asked = {name: getattr(args, name) for name in ("model", "steps", "guidance", "scheduler", "prompts")}
    asked |= {"size": args.size} if args.size != KNOWN else {}
    asked |= {"squeeze": True} if args.squeeze else {}
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    left_out = {"size": KNOWN, "squeeze": False}  # in rows that are as usual
    rows = [row for row in rows if (left_out | asked).items() <= (left_out | row).items()]
    asked_for = {label(*each): each for each in contenders(args.model, args.steps, args.table)}
    todo = [each for name, each in asked_for.items() if name not in {row["method"] for row in rows}]
    if todo:
        generator = ImageGenerator(args)
        dense, whole, dense_seconds = generator.all("dense", 0.0)
    for number, contender in enumerate(todo, 1):
        print(f"{number}/{len(todo)} {label(*contender)}", file=sys.stderr, flush=True)
        try:
            pictures, flops, seconds = generator.all(*contender)
        except (ValueError, ImportError) as error:
            print(f"  left out: {error}", file=sys.stderr)
            continue
        decibels = psnr(dense, pictures)
        row = {**asked, "method": label(*contender), "work": flops / whole, "time": seconds / dense_seconds}
        row |= {"psnr": decibels.mean().item(), "worst": decibels.min().item()}
        rows.append(row)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    rows.sort(key=lambda row: -row["psnr"])
    columns = {"": [row["method"] for row in rows], "work left": [f"{row['work']:.2f}" for row in rows]}
    columns |= {name: [f"{row[name]:.1f}" for row in rows] for name in ("psnr", "worst")}
    print(markdown(columns))
    if args.plot:
        lines = [
            {**row, "method": method, "ratio": ratio, "speedup": 1 / row["time"]}
            for row in rows
            for method, ratio in [asked_for[row["method"]]]
            if math.isfinite(row["psnr"])  # dense has no point, but a line
        ]
        pareto_plot(lines, "psnr", f"{args.model}, {args.steps} steps, {args.prompts} prompts", args.plot)


if __name__ == "__main__":
    main()
