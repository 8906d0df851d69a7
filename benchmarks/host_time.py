"""The Python time that tomadiff adds to a call of a model, at tiny widths and true depth.

python benchmarks/host_time.py

On a fast GPU this is time in which the device may run out of work. It is measured inside each call, as what
is left when the time within the model and its blocks is taken away: calls of a whole model vary by more than
tomadiff adds, and blocks take another time with fewer tokens. A plain model with the same clocks on it shows
what the clocks cost. By default weights are made in every step; with plans that are reused, none is made in
most steps. "As on a GPU" takes the way of Triton's kernels for planning, merging and unmerging, up to
launches that do nothing: only the driver's own time is missing.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from kernel_resources import launching_nothing
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
        unet.eval(),
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
        transformer.eval(),
        lambda model, timestep: model(timestep=timestep.expand(1), **arguments),
    )


class Stopwatch:
    """The time that a model's calls spend around the model and around its blocks, where tomadiff works."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self.model, self.seconds = model, 0.0
        blocks = [module for module in model.modules() if type(module).__name__.endswith("TransformerBlock")]
        for block in blocks:
            block.forward = self._timed(block.forward, -1)
        if settings:
            tomadiff.apply(model, **settings)
        for block in blocks:
            block.forward = self._timed(block.forward, 1)
        model._call_impl = self._timed(model._call_impl, -1)

    def around(self, call: Call, timestep: Tensor) -> float:
        self.seconds = 0.0
        self._timed(call, 1)(self.model, timestep)
        return self.seconds

    def _timed(self, function: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            output = function(*args, **kwargs)
            self.seconds += sign * (time.perf_counter() - start)
            return output

        return timed


class Times(NamedTuple):
    """Medians of milliseconds: of a plain call, and of what tomadiff adds to one."""

    dense: float
    python: float
    operators: float  # in planning, merging and unmerging

    @property
    def added(self) -> float:
        return self.python + self.operators


def measure(case: Case, generations: int, settings: dict[str, Any]) -> Times:
    plain, patched = Stopwatch(copy.deepcopy(case.model)), Stopwatch(copy.deepcopy(case.model), **settings)
    spent = session_of(patched.model).times.seconds
    rows = []
    for generation in range(generations):
        table = torch.linspace(999, 1, STEPS)
        for step in range(STEPS):
            start, before = time.perf_counter(), sum(spent.values()) - spent["model"]
            clocks = plain.around(case.call, table[step])
            dense = time.perf_counter() - start
            added = patched.around(case.call, table[step]) - clocks
            operators = sum(spent.values()) - spent["model"] - before
            if generation and step >= 3:  # the first generation is to warm up, the first steps always run
                rows.append((dense, added - operators, operators))
    return Times(*(1000 * statistics.median(column) for column in zip(*rows)))


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python benchmarks/host_time.py", description=__doc__.splitlines()[0])
    parser.add_argument("--generations", type=int, default=8, help="each of 25 steps (default: 8)")
    args = parser.parse_args(argv)
    if args.generations < 1:
        parser.error(f"--generations {args.generations} must be at least 1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"Time of one thread, medians over {args.generations} generations, {processor('cpu')}:\n")
    print("| model | dense call | added to a merged call | its Python | its operators | a forecast |")
    print("|---|--:|--:|--:|--:|--:|")
    for case in (sdxl(), flux()):
        forecast = measure(case, args.generations + 1, {"interval": 10**6}).added
        for label, more, way in (
            ("", {}, nullcontext),
            (", plans reused", REUSED, nullcontext),
            (", as on a GPU", {}, launching_nothing),
            (", as on a GPU, plans reused", REUSED, launching_nothing),
        ):
            with way():
                times = measure(case, args.generations + 1, {"ratio": 0.5, **more})
            figures = (times.dense, times.added, times.python, times.operators, forecast)
            print(f"| {case.label}{label} | {' | '.join(f'{ms:.2f} ms' for ms in figures)} |", flush=True)


if __name__ == "__main__":
    main()
