"""What to forecast: outputs as they are, the clean images that they stand for, or the mean of both.

python benchmarks/forecasts.py emoji-unet --prompts 4

Prints the PSNR to the dense picture, and that of the worst, in floating point. The steps that run are the
same in every column. What is in the file is not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from closeness import KNOWN, ImageGenerator, psnr

from tomadiff.runtime import forecast, session
from tomadiff.tools.demo.embedded import EMBEDDED
from tomadiff.tools.drawing import markdown

NOISY = {"emoji-unet": "euler-a", "emoji-flux": "stochastic"}
# steps, sampler, interval; "noisy" is one that adds noise at every step
CASES = [(8, None, 2), (16, None, 2), (24, None, 2), (24, None, 3), (24, None, 4)]
CASES += [(14, "dpm++", 2), (8, "noisy", 2), (24, "noisy", 2)]
WAYS = ("outputs", "images", "both")


@contextmanager
def forecasting(way: str) -> Iterator[None]:
    """Change what is forecast for the length of a `with` block."""
    trust, prediction_of = forecast.TRUST, session.prediction_of
    if way == "outputs":
        session.prediction_of = lambda *_: None
    elif way == "images":
        forecast.TRUST = 1e12
    try:
        yield
    finally:
        forecast.TRUST, session.prediction_of = trust, prediction_of


def main() -> None:
    parser = argparse.ArgumentParser("python benchmarks/forecasts.py", description=__doc__)
    parser.add_argument("model", choices=list(EMBEDDED))
    parser.add_argument("--prompts", type=int, default=4, help="evenly spaced ones of all (default: 4)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("forecasts.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    asked = {"model": args.model, "prompts": args.prompts}
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    rows = [row for row in rows if asked.items() <= row.items()]
    for steps, sampler, interval in CASES[len(rows) :]:
        scheduler = NOISY[args.model] if sampler == "noisy" else sampler
        print(f"{steps} steps, {scheduler}, interval={interval}", file=sys.stderr, flush=True)
        options = argparse.Namespace(scheduler=scheduler, steps=steps, guidance=None, size=KNOWN)
        generator = ImageGenerator(argparse.Namespace(**vars(args) | vars(options), squeeze=False))
        dense = generator.all("dense", 0.0)[0]
        row = {**asked, "case": f"{steps}, {scheduler or 'euler'}, `interval={interval}`"}
        for way in WAYS:
            with forecasting(way):
                decibels = psnr(dense, generator.all(f"tomadiff:interval={interval}", 0.0)[0])
            row[way] = f"{decibels.mean():.1f} ({decibels.min():.1f})"
        rows.append(row)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print(
        markdown({"steps": [row["case"] for row in rows]} | {way: [row[way] for row in rows] for way in WAYS})
    )


if __name__ == "__main__":
    main()
