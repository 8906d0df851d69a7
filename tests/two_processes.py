"""diffusers' context parallelism on two processes: what merging says there, and what forecasting draws."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import ContextParallelConfig, DiffusionPipeline
from pipelines import bare_call, denoiser, draw, make, text

import tomadiff
from tomadiff.errors import ConfigError

STEPS = 6


def forecast(pipe: DiffusionPipeline) -> dict[str, Any]:
    """What is drawn with interval alone. The 8 tokens of text can be halved, as those of the image."""
    tomadiff.apply(pipe, interval=2)
    latents = draw(pipe, steps=STEPS, guidance=1.0, prompt_embeds=text(0, 8)[0])
    return {"latents": latents, "steps": tomadiff.report(pipe).steps}


def main(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2
    )
    # diffusers numbers accelerators even where it then takes the CPU
    torch.accelerator.device_count = lambda: 1
    pipe = make("flux")
    model = denoiser(pipe)
    alone = forecast(pipe)
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    torch.save((alone, forecast(pipe)), folder / f"{rank}.pt")
    tomadiff.apply(pipe, ratio=0.5)
    try:
        model(**bare_call(model))
    except ConfigError as error:
        (folder / f"{rank}.txt").write_text(str(error))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":  # forked after the imports, which take longer than all the rest
    other = os.fork()
    main(0 if other else 1, Path(sys.argv[1]))
    if other:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
