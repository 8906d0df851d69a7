"""Show what tomadiff does with the embedded models: pictures, merge maps, times and fidelity."""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

import tomadiff
from tomadiff.reporting import Report
from tomadiff.runtime.files import check_folder
from tomadiff.runtime.registration import denoiser
from tomadiff.settings_file import load as load_settings
from tomadiff.settings_file import warn_of_another
from tomadiff.tools.denoiser_flops import counted
from tomadiff.tools.drawing import beside, contact_sheet, draw_merge_map
from tomadiff.tools.evaluate.metrics import psnr, ssim
from tomadiff.tools.evaluate.pictures import as_tensor
from tomadiff.tools.generate import Request, check_output, draw, save
from tomadiff.tools.merge_map import MergeMap, Recorder

from .embedded import MERGING, load_embedded
from .pipelines import EmojiPipeline
from .true_size import speedup_of_a_block

GUIDANCE = 1.0  # none: as good for these prompts, and a newcomer waits half as long
MERGED = ", ".join(f"{name}={value}" for name, value in MERGING.items())
CONFIGS: dict[str, tomadiff.Config] = {
    "dense": tomadiff.Config(ratio=0),
    "apply(pipe)": tomadiff.Config(),
    MERGED: tomadiff.Config(**MERGING),
}


def run(args: argparse.Namespace) -> None:
    """`tomadiff demo`."""
    configs = dict(CONFIGS)
    files = {path: load_settings(path) for path in args.settings}
    stems = [*configs, *(path.stem for path in files)]  # files with the same name need different titles
    configs |= {
        path.stem if stems.count(path.stem) == 1 else str(path): file.config for path, file in files.items()
    }
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps} must be at least 1")
    check_folder(args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.models:
        check_output(args.out / f"{name}.png")
        pipe = load_embedded(name)
        pipe.text_encoder.tokenize(args.prompts)  # raises for prompts that it doesn't know
        for path, file in files.items():
            warn_of_another(path, file, denoiser(pipe)[0])
        show(pipe, name, args.out, args.prompts, args.steps, configs)
    print(speedup_of_a_block())


def show(
    pipe: EmojiPipeline,
    name: str,
    folder: Path,
    prompts: list[str],
    steps: int,
    configs: dict[str, tomadiff.Config],
) -> None:
    pipe.set_progress_bar_config(disable=True)
    requests = [Request(prompt, seed=1, steps=steps, guidance=GUIDANCE) for prompt in prompts]
    draw(pipe, Request(prompts[0], steps=1, guidance=GUIDANCE))  # warm up
    pictures: list[list[Image.Image]] = []
    seconds: list[list[float]] = []
    work: dict[str, Work] = {}
    mapped: list[MergeMap] = []  # of the first prompt
    longest = max(map(len, prompts))
    for number, request in enumerate(requests, 1):
        print(f"\r{name}: {number}/{len(requests)} {request.prompt:{longest}}", end="", flush=True)
        row = []
        for title, config in configs.items():
            # counting slows a picture down a little, so it is done for one of them, for all configurations
            with tomadiff.merged(pipe, config), nullcontext() if title in work else counted(pipe) as counter:
                recorder = Recorder(pipe) if title == MERGED and not mapped else None
                row.append(draw(pipe, request, callback_on_step_end=recorder))
                report = tomadiff.report(pipe)
            if recorder is not None:
                mapped = recorder.first_middle_last()
            if counter is not None:
                work[title] = Work(report, counter.flops)
        pictures.append([picture for picture, _ in row])
        seconds.append([took for _, took in row])
    threads = torch.get_num_threads()
    heading = f"{name} ({report.model}), {steps} steps, no guidance, {threads} thread{'s'[: threads > 1]}"
    print("\r" + heading.ljust(longest + 20))
    scores = table(pictures, seconds, work)
    captions = [[""] + [f"{value:.1f} dB" for value in row] for row in scores]
    settings = {"model": name, "prompts": prompts, "seed": 1, "steps": steps, "guidance": GUIDANCE}
    settings["configs"] = {title: config.asked() for title, config in configs.items()}
    save(contact_sheet(pictures, list(configs), prompts, captions), folder / f"{name}.png", settings)
    print(f"  pictures: {folder / name}.png")
    merged = pictures[0][list(configs).index(MERGED)]
    maps = [draw_merge_map(merged, each) for each in mapped]
    labels = [f"{prompts[0]}, step {each.step + 1} of {steps}" for each in mapped]
    save(beside(maps, labels), folder / f"{name}-merge-map.png", settings)
    print(f"  merge map: {folder / name}-merge-map.png")


@dataclass(frozen=True)
class Work:
    """What the denoiser did for a picture."""

    report: Report
    flops: int

    def __str__(self) -> str:
        """The steps that ran, and on how many tokens."""
        kept = max((site.kept for site in self.report.sites if site.kept < site.tokens), default=None)
        ran, forecast = self.report.steps["run"], self.report.steps["forecast"]
        return f"{ran} of {ran + forecast}" + (f" on {kept} tokens" if kept else "")


def table(
    pictures: list[list[Image.Image]], seconds: list[list[float]], work: dict[str, Work]
) -> list[list[float]]:
    """Print steps, time and fidelity of each configuration; returns PSNR to dense by prompt, then title."""
    width, wide = max(map(len, work)), max(len(str(did)) for did in work.values())
    print(f"  {'':{width}}  {'steps run':>{wide}}  work left  s / image  speed-up  PSNR to dense   SSIM")
    whole = next(iter(work.values())).flops
    scores = []
    for column, (title, did) in enumerate(work.items()):
        took = statistics.median(row[column] for row in seconds)
        speedup = statistics.median(row[0] / row[column] for row in seconds)
        dense, merged = (as_tensor([row[at] for row in pictures]) for at in (0, column))
        decibels, structure = psnr(dense, merged), ssim(dense, merged)
        if column:
            scores.append(decibels.tolist())
            quality = f"{decibels.mean():10.1f} dB  {structure.mean():.3f}"
        else:
            quality = "             -      -"
        left = did.flops / whole
        print(f"  {title:{width}}  {did!s:>{wide}}  {left:9.2f}  {took:9.2f}  {speedup:7.2f}x  {quality}")
    return [list(row) for row in zip(*scores)]
