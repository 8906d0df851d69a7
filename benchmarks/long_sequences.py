"""Time of attention and of its block against the size of the picture: dense, on merged keys, and by ToDo.

python benchmarks/long_sequences.py --out long.jsonl

prints the table of docs/benchmarks.md. Blocks have their true width and random weights; one of each model is
built. Times are the processor's, on one thread: other work on the machine counts as little as it can. Ways
take turns, each compared with the dense call of its round. A plan is made in every sixth step, as by default,
so that a sixth of its time counts. What is in the file is not measured again: an interrupted run goes on.
With --memory, memory is measured instead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import (
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from torch import nn

import tomadiff
from tomadiff.config import Config
from tomadiff.methods import METHODS
from tomadiff.runtime.machine import processor
from tomadiff.tools.bench.architectures import ARCHITECTURES
from tomadiff.tools.drawing import markdown

KV: dict[str, Any] = {"where": "kv", "weigh_keys": True, "dense_blocks": 0}
CONTENDERS: dict[str, dict[str, Any]] = {
    "dense": {},
    "kv 0.75": {**KV, "ratio": 0.75},
    "kv 0.9": {**KV, "ratio": 0.9},
    "ToDo 0.75": {"method": "todo", "ratio": 0.75},
}
FEW = 5000  # tokens up to which there are several rounds
ROUNDS = 3
PLAN_STEPS = 6  # that a plan is kept for
# freed memory goes back to the system at once, so that what is taken up is what is needed; slower
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

Grid = tuple[int, ...]


class Measured(NamedTuple):
    """One block of a model."""

    title: str
    config: dict[str, Any]  # of the model, with one block
    build: Callable[..., nn.Module]
    call: Callable[[nn.Module, Grid], dict[str, Any]]  # the model's arguments for a grid of tokens
    block: str  # names of the block's and of its self-attention's classes of module
    attentions: tuple[str, ...]
    sizes: dict[str, Grid]


def squares(*sides: int) -> dict[str, Grid]:
    """Of pictures, at 16 pixels a token."""
    return {f"{side} x {side}": (side // 16, side // 16) for side in sides}


def unet_call(model: nn.Module, grid: Grid) -> dict[str, Any]:
    text = torch.randn(1, 77, model.config.cross_attention_dim)
    return {"sample": torch.randn(1, 4, *grid), "timestep": 500, "encoder_hidden_states": text}


def sd3_call(model: nn.Module, grid: Grid) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 16, 2 * grid[0], 2 * grid[1]),
        "encoder_hidden_states": torch.randn(1, 333, model.config.joint_attention_dim),
        "pooled_projections": torch.randn(1, model.config.pooled_projection_dim),
        "timestep": torch.tensor([500.0]),
    }


def flux_call(model: nn.Module, grid: Grid) -> dict[str, Any]:
    rows, columns = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
    return {
        "hidden_states": torch.randn(1, grid[0] * grid[1], model.config.in_channels),
        "encoder_hidden_states": torch.randn(1, 512, model.config.joint_attention_dim),
        "pooled_projections": torch.randn(1, model.config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.stack([0 * rows, rows, columns], dim=-1).flatten(0, 1),
        "txt_ids": torch.zeros(512, 3),
    }


def wan_call(model: nn.Module, grid: Grid) -> dict[str, Any]:
    frames, rows, columns = grid
    return {
        "hidden_states": torch.randn(1, 16, frames, 2 * rows, 2 * columns),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 512, model.config.text_dim),
    }


WAN = ARCHITECTURES["wan-1.3b"].config | {"num_layers": 1}
VIDEOS = {f"832 x 480, {4 * frames - 3} frames": (frames, 30, 52) for frames in (5, 9, 21)}
MODELS = {
    "sdxl": Measured(
        "SDXL, its finest level with attention",
        {
            "block_out_channels": (640,),
            "down_block_types": ("CrossAttnDownBlock2D",),
            "mid_block_type": None,
            "up_block_types": ("UpBlock2D",),
            "layers_per_block": 1,
            "attention_head_dim": 10,  # in UNets, the number of heads
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
        },
        UNet2DConditionModel,
        unet_call,
        "BasicTransformerBlock",
        ("attn1",),
        squares(1024, 1536, 2048, 3072, 4096),
    ),
    "sd35": Measured(
        "SD 3.5 Medium, a block with two attentions",
        ARCHITECTURES["sd35-medium"].config | {"num_layers": 1, "dual_attention_layers": (0,)},
        SD3Transformer2DModel,
        sd3_call,
        "JointTransformerBlock",
        ("attn", "attn2"),
        squares(1024, 1536, 2048),
    ),
    "flux": Measured(
        "Flux.1, a single block",
        ARCHITECTURES["flux-dev"].config | {"num_layers": 0, "num_single_layers": 1},
        FluxTransformer2DModel,
        flux_call,
        "FluxSingleTransformerBlock",
        ("attn",),
        squares(1024, 1536, 2048),
    ),
    "wan": Measured(
        "Wan 2.1 1.3B", WAN, WanTransformer3DModel, wan_call, "WanTransformerBlock", ("attn1",), VIDEOS
    ),
    "wan14": Measured(
        "Wan 2.1 14B",
        WAN | {"num_attention_heads": 40, "ffn_dim": 13824},
        WanTransformer3DModel,
        wan_call,
        "WanTransformerBlock",
        ("attn1",),
        dict(list(VIDEOS.items())[:2]),
    ),
}


class Clock:
    """Seconds of the processor in a module, added up."""

    def __init__(self, *modules: nn.Module) -> None:
        self.seconds = self._start = 0.0
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self._begin())
            module.register_forward_hook(lambda *_: self._end())

    def _begin(self) -> None:
        self._start = time.process_time()

    def _end(self) -> None:
        self.seconds += time.process_time() - self._start


class Peak:
    """Megabytes that the process takes up at most, above what it takes up before; Linux only."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self._read("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.megabytes = (self._read("VmHWM") - self.before) / 1024

    @staticmethod
    def _read(what: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(what))


def build(name: str) -> tuple[nn.Module, Clock, Clock]:
    """A model with one block, and clocks on the block and on its self-attention."""
    measured = MODELS[name]
    torch.manual_seed(0)
    model = measured.build(**measured.config).eval()
    block = next(module for module in model.modules() if type(module).__name__ == measured.block)
    return model, Clock(block), Clock(*(getattr(block, path) for path in measured.attentions))


@torch.inference_mode()
def measure(
    name: str, model: nn.Module, clocks: tuple[Clock, Clock], grid: Grid, contender: str
) -> dict[str, Any]:
    """Seconds of the block, of its attention and of a plan, and the memory that the call takes."""
    settings, measured = CONTENDERS[contender], MODELS[name]
    call = measured.call(model, grid)
    if settings:
        tomadiff.apply(model, **settings)
    for clock in clocks:
        clock.seconds = 0.0
    with Peak() as peak:
        model(**call)
    tomadiff.remove(model)
    block, attention = (clock.seconds for clock in clocks)
    plan = planning(model, grid, settings) * len(measured.attentions) if settings else 0.0
    spared = plan * (1 - 1 / PLAN_STEPS) if "method" not in settings else 0.0
    return {
        "block": block - spared,
        "attention": attention - spared,
        "plan": plan,
        "megabytes": peak.megabytes,
    }


def planning(model: nn.Module, grid: Grid, settings: dict[str, Any]) -> float:
    config, model_config = Config(**settings).resolve(), dict(model.config)
    heads = model_config.get("num_attention_heads")
    width = heads * model_config["attention_head_dim"] if heads else model_config["block_out_channels"][0]
    features = torch.randn(1, torch.Size(grid).numel(), width)
    start = time.process_time()
    METHODS[config.method].plan(features, grid, config.ratio, config.plan).log_sizes()
    return time.process_time() - start


def table(rows: list[dict[str, Any]]) -> str:
    """Seconds of dense ones, and how many times faster others are: medians over rounds."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["size"]), []).append(row)
    cells: list[dict[str, str]] = []
    for (name, size), group in found.items():
        rounds: dict[int, dict[str, Any]] = {}
        for row in group:
            rounds.setdefault(row["round"], {})[row["contender"]] = row
        complete = [one for one in rounds.values() if {"dense", "kv 0.75"} <= one.keys()]
        if not complete:
            continue
        cell = {"": MODELS[name].title, "size": size, "tokens": f"{group[0]['tokens']:,}"}
        whole, attention = (
            statistics.median(one["dense"][part] for one in complete) for part in ("block", "attention")
        )
        cell["dense attention"] = f"{attention:.2f} s ({attention / whole:.0%})"
        for contender in list(CONTENDERS)[1:]:
            both = [(one["dense"], one[contender]) for one in complete if contender in one]
            faster = [
                f"{statistics.median(dense[part] / merged[part] for dense, merged in both):.2f}x"
                for part in ("attention", "block")
                if both
            ]
            cell[f"{contender}: attention, block"] = ", ".join(faster) or "-"
        plan = statistics.median(one["kv 0.75"]["plan"] / one["dense"]["attention"] for one in complete)
        cell["a plan"] = f"{plan:.1%}"
        cells.append(cell)
    return markdown({name: [cell[name] for cell in cells] for name in (cells[0] if cells else {})})


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds of attention against tokens: a panel for each model, a line for each contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot.subplots(1, len(names), figsize=(1 + 4.6 * len(names), 4), dpi=110, squeeze=False)
    for name, axis in zip(names, axes[0]):
        for contender in CONTENDERS:
            seconds: dict[int, list[float]] = {}
            for row in rows:
                if (row["model"], row["contender"]) == (name, contender):
                    seconds.setdefault(row["tokens"], []).append(row["attention"])
            points = sorted((tokens, statistics.median(found)) for tokens, found in seconds.items())
            axis.loglog(*zip(*points), marker="o", label=contender)
        tokens = sorted({row["tokens"] for row in rows if row["model"] == name})
        low, high = axis.get_ylim()
        seconds_shown = [each for each in (0.1, 0.3, 1, 3, 10, 30, 100, 300) if low < each < high]
        axis.minorticks_off()
        axis.set_xticks(tokens, [f"{each:,}" for each in tokens])
        axis.set_yticks(seconds_shown, [f"{each:g}" for each in seconds_shown])
        axis.set_title(MODELS[name].title, fontsize=10)
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("seconds of attention")
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def memory(models: list[str], sizes: list[str]) -> str:
    """Megabytes that a call takes beside the weights; the first call of each way is to warm up."""
    columns: dict[str, list[str]] = {"": [], "size": [], "dense": [], "kv 0.75": []}
    for name in models:
        model, *clocks = build(name)
        for size in sizes:
            grid = MODELS[name].sizes[size]
            contenders = ("dense", "dense", "kv 0.75", "kv 0.75")
            rows = {
                contender: measure(name, model, tuple(clocks), grid, contender) for contender in contenders
            }
            columns[""].append(MODELS[name].title)
            columns["size"].append(size)
            for contender, row in rows.items():
                columns[contender].append(f"{row['megabytes']:.0f} MB")
            print(f"{name}, {size}", file=sys.stderr, flush=True)
    return markdown(columns)


def main() -> None:
    parser = argparse.ArgumentParser("python benchmarks/long_sequences.py", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--sizes", nargs="+", help="only these, as in the table")
    parser.add_argument("--out", type=Path, default=Path("long_sequences.jsonl"))
    parser.add_argument("--memory", action="store_true", help="measure memory instead, at --sizes")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw what is in the file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.memory:
        if not EXACT.items() <= os.environ.items():
            os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **EXACT})
        print(memory(args.models, args.sizes or ["1024 x 1024"]))
        return
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {(row["model"], row["size"], row["round"], row["contender"]) for row in rows}
    todo = [
        (name, size, number, contender)
        for name in args.models
        for size, grid in MODELS[name].sizes.items()
        if not args.sizes or size in args.sizes
        for number in range(ROUNDS if torch.Size(grid).numel() <= FEW else 1)
        for contender in CONTENDERS
        if (name, size, number, contender) not in done
    ]
    built = ""
    for count, (name, size, number, contender) in enumerate(todo, 1):
        print(f"{count}/{len(todo)} {name}, {size}, {contender}", file=sys.stderr, end=" ", flush=True)
        if built != name:
            model, *clocks = build(name)
            built = name
        grid = MODELS[name].sizes[size]
        row = {
            "model": name,
            "size": size,
            "round": number,
            "contender": contender,
            "tokens": torch.Size(grid).numel(),
        }
        row |= measure(name, model, tuple(clocks), grid, contender)
        print(f"attention {row['attention']:.1f} s, block {row['block']:.1f} s", file=sys.stderr, flush=True)
        rows.append(row)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print(f"{processor('cpu')}, one thread, fp32")
    print(table(rows))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
