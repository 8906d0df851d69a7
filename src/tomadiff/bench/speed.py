"""How much faster, against what is possible: methods take turns in one process, call by call.

Timings on a shared machine swing by a factor of two, so only calls of one round are compared with each
other: the figures are medians of ratios within rounds.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from .. import hook
from ..config import Config, make
from ..families import Family, family_of, unet
from . import models

DEFAULT = "default"


@dataclass
class Contender:
    """One way to run the model. `on` and `off` switch it; the rest is what was measured, a number a round."""

    name: str
    on: Callable[[], Any] = lambda: None
    off: Callable[[], Any] = lambda: None
    patch: hook.Patch | None = None
    seconds: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)  # bytes
    plan_seconds: float = 0.0  # for all plans of a step


def contender(model: nn.Module, ratio: float, name: str) -> Contender:
    """By name: dense, ideal, tomesd (the real one), default, a preset; also `default:field=value,...`."""
    if name == "dense":
        return Contender(name)
    if name == "tomesd":
        import tomesd

        # its own default, max_downsample=1, finds nothing to merge in SDXL
        return Contender(
            name,
            lambda: tomesd.apply_patch(model, ratio=ratio, max_downsample=4),
            lambda: tomesd.remove_patch(model),
        )
    family = family_of(model)
    patch = hook.Patch(model, family, configuration(name, ratio, family))
    return Contender(name, lambda: hook.attach(patch), lambda: hook.detach(patch), patch)


def configuration(name: str, ratio: float, family: Family) -> Config:
    preset, _, fields = name.partition(":")
    settings: dict[str, Any] = {"ratio": ratio} | dict(map(_setting, filter(None, fields.split(","))))
    if preset == "ideal":
        settings["method"] = "ideal"
    return make(None, None if preset in (DEFAULT, "ideal") else preset, settings, family.paper_reuse)


def _setting(pair: str) -> tuple[str, Any]:
    name, _, value = pair.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


@torch.no_grad()
def measure(call: Callable[[int], Any], entries: list[Contender], rounds: int) -> None:
    """Warm everything up once, which is when plans are made, then go round."""
    total = (rounds + 1) * len(entries)
    begin = time.perf_counter()
    for turn in range(rounds + 1):
        for place, entry in enumerate(entries):
            entry.on()
            reset_peak()
            start = time.perf_counter()
            call(999 - turn)  # one step further in each round
            seconds = time.perf_counter() - start
            entry.off()
            if turn:
                entry.seconds.append(seconds)
                entry.peak.append(peak())
            elif entry.patch is not None:
                entry.plan_seconds = entry.patch.seconds["plan"]
            done = turn * len(entries) + place + 1
            left = (time.perf_counter() - begin) / done * (total - done) / 60
            note = "" if turn else " (warm-up)"
            print(
                f"[{done}/{total}, {left:.0f} min left] {entry.name}: {seconds:.2f} s{note}", file=sys.stderr
            )


def reset_peak() -> None:
    """Let the kernel forget the most memory this process ever had."""
    if os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """The most memory since then, in bytes; 0 where the kernel doesn't tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def results(entries: list[Contender]) -> list[dict[str, Any]]:
    """One row for each contender."""
    by_name = {entry.name: entry for entry in entries}
    rows = []
    for entry in entries:
        row: dict[str, Any] = {"method": entry.name, "seconds": statistics.median(entry.seconds)}
        row["rounds"] = entry.seconds
        row["peak_gb"] = max(entry.peak) / 1e9
        if "dense" in by_name:
            dense = by_name["dense"]
            ratios = [d / s for d, s in zip(dense.seconds, entry.seconds)]
            row["speedup"], row["speedup_spread"] = statistics.median(ratios), [min(ratios), max(ratios)]
            row["peak_change"] = max(entry.peak) / max(dense.peak) - 1 if max(dense.peak) else None
            if "ideal" in by_name:
                ideal = by_name["ideal"]
                row["of_ideal_saving"] = statistics.median(
                    (d - s) / (d - i) for d, s, i in zip(dense.seconds, entry.seconds, ideal.seconds)
                )
        if entry.patch is not None:
            calls = entry.patch.model_calls
            row["plan_seconds"] = entry.plan_seconds
            row["merge_seconds"] = entry.patch.seconds["merge"] / calls
            row["unmerge_seconds"] = entry.patch.seconds["unmerge"] / calls
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| method | s / call | speed-up (range) | of the ideal saving | peak memory |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row.get("speedup_spread", (1, 1))
        share = f"{row['of_ideal_saving']:.0%}" if row.get("of_ideal_saving") else "-"
        change = row.get("peak_change")
        memory = f"{row['peak_gb']:.2f} GB" + (f" ({change:+.1%})" if change else "")
        lines.append(
            f"| {row['method']} | {row['seconds']:.2f} | {row.get('speedup', 1):.2f}x ({low:.2f}-{high:.2f}) "
            f"| {share} | {memory} |"
        )
    return "\n".join(lines)


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0].partition(":")[2].strip() if names else platform.processor()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size", type=int, nargs=2, default=(1024, 1024), metavar=("H", "W"), help="in pixels"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=["dense", "ideal", DEFAULT, "tomesd"])
    parser.add_argument("--json", type=Path, help="also write everything that was measured to this file")


def run(args: argparse.Namespace) -> int:
    """Time one call of SDXL's UNet (random weights, fp32, on the CPU), methods taking turns."""
    for name in {*args.methods} - {"dense", "tomesd"}:
        configuration(name, args.ratio, unet.FAMILY)  # a mistake should not wait for ten gigabytes
    torch.manual_seed(0)
    print("building SDXL's UNet (10.3 GB, random weights)...", file=sys.stderr)
    model = models.sdxl()
    call = models.sdxl_call(model, tuple(args.size), args.batch)
    entries = [contender(model, args.ratio, name) for name in args.methods]
    try:
        measure(call, entries, args.rounds)
    except KeyboardInterrupt:
        done = min(len(entry.peak) for entry in entries)
        if not done:
            raise
        print(f"\ninterrupted: {done} of {args.rounds} rounds count", file=sys.stderr)
        for entry in entries:
            entry.seconds, entry.peak = entry.seconds[:done], entry.peak[:done]
    rows = results(entries)
    about = {
        "model": "SDXL UNet, random weights, fp32",
        "size": list(args.size),
        "batch": args.batch,
        "ratio": args.ratio,
        "rounds": len(entries[0].seconds),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(table(rows))
    for entry, row in zip(entries, rows):
        if entry.patch is not None and entry.patch.config.method == "toma":
            print(overhead(row, entry.patch.config))
    if args.json:
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    return 0


def overhead(row: dict[str, Any], config: Config) -> str:
    """Planning, merging and unmerging as a share of a step, spread over the refresh schedule.

    New weights cost less than a whole plan; here they count as one.
    """
    plan = row["plan_seconds"] / config.refresh_weights
    share = row["overhead"] = (plan + row["merge_seconds"] + row["unmerge_seconds"]) / row["seconds"]
    return (
        f"{row['method']}: planning {row['plan_seconds']:.3f} s every {config.refresh_weights} steps, "
        f"merging {row['merge_seconds']:.3f} s and unmerging {row['unmerge_seconds']:.3f} s a call: "
        f"{share:.1%} of a step"
    )
