"""The Python time that tomadiff adds to a call of a model, at tiny widths and true depth.

python benchmarks/host_time.py

On a fast GPU this is time in which the device may run out of work. Calls alternate between a plain model
and one with tomadiff on it; the figure is the median of the differences of neighbours. By default weights are
made in every step; with plans that are reused, none is made in most steps.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from torch import Tensor, nn

import tomadiff
from tomadiff.runtime.machine import processor
from tomadiff.runtime.registration import session_of

WIDTH = 16  # of text embeddings
STEPS = 25  # of a generation
REUSED = {"unmerge": "transpose", "refresh_weights": 6}  # plans are used in six steps
Call = Callable[[nn.Module, Tensor], Any]  # of a model, at a timestep


class Case(NamedTuple):
    """A model with the number of blocks that the real one has."""

    label: str
    model: nn.Module
    call: Call


def sdxl() -> Case:
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(8, 8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        layers_per_block=2,
        norm_num_groups=4,
        attention_head_dim=(2, 2, 4),
        use_linear_projection=True,
        cross_attention_dim=WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=WIDTH + 6 * 8,
    )
    sample, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, WIDTH)
    added = {"text_embeds": torch.randn(1, WIDTH), "time_ids": torch.ones(1, 6)}
    return Case(
        "SDXL, 70 blocks",
        unet,
        lambda model, timestep: model(sample, timestep, encoder_hidden_states=text, added_cond_kwargs=added),
    )


def flux() -> Case:
    transformer = FluxTransformer2DModel(
        in_channels=4,
        num_layers=19,
        num_single_layers=38,
        attention_head_dim=16,
        num_attention_heads=1,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    grid = torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0))
    arguments = {
        "hidden_states": torch.randn(1, 64, 4),
        "encoder_hidden_states": torch.randn(1, 7, WIDTH),
        "pooled_projections": torch.randn(1, WIDTH),
        "img_ids": grid,
        "txt_ids": torch.zeros(7, 3),
    }
    return Case(
        "Flux.1, 19 + 38 blocks",
        transformer,
        lambda model, timestep: model(timestep=timestep.expand(1), **arguments),
    )


class Times(NamedTuple):
    """Medians of seconds: of a plain call, of what tomadiff adds to one, and of its operators in that."""

    dense: float
    added: float
    operators: float  # in planning, merging and unmerging; the rest is Python


def measure(case: Case, generations: int, settings: dict[str, Any]) -> Times:
    plain, patched = case.model.eval(), copy.deepcopy(case.model).eval()
    tomadiff.apply(patched, **settings)
    spent = session_of(patched).times.seconds
    dense, added, operators = [], [], []
    for generation in range(generations):
        table = torch.linspace(999, 1, STEPS)
        for step in range(STEPS):
            seconds, before = {}, sum(spent.values()) - spent["model"]
            for model in (plain, patched) if step % 2 else (patched, plain):
                start = time.process_time()
                with torch.no_grad():
                    case.call(model, table[step])
                seconds[model] = time.process_time() - start
            if generation and step >= 3:  # the first generation is to warm up, the first steps always run
                dense.append(seconds[plain])
                added.append(seconds[patched] - seconds[plain])
                operators.append(sum(spent.values()) - spent["model"] - before)
    return Times(*map(statistics.median, (dense, added, operators)))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python benchmarks/host_time.py", description=__doc__.splitlines()[0])
    parser.add_argument("--generations", type=int, default=8, help="each of 25 steps (default: 8)")
    args = parser.parse_args(argv)
    if args.generations < 1:
        parser.error(f"--generations {args.generations} must be at least 1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"CPU time of one thread, medians over {args.generations} generations, {processor('cpu')}:\n")
    print("| model | dense call | added to a merged call | its operators | a forecast instead of a call |")
    print("|---|--:|--:|--:|--:|")
    for case in (sdxl(), flux()):
        skipped = measure(case, args.generations + 1, {"interval": 10**6})
        forecast = f"{1000 * (skipped.dense + skipped.added):.2f} ms"
        for label, more in (("", {}), (", plans reused", REUSED)):
            times = measure(case, args.generations + 1, {"ratio": 0.5, **more})
            dense, added, operators = (f"{1000 * seconds:.2f} ms" for seconds in times)
            print(f"| {case.label}{label} | {dense} | {added} | {operators} | {forecast} |", flush=True)


if __name__ == "__main__":
    main()
