"""diffusers' context parallelism on two processes: what a merged model says there, one line a process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from diffusers import ContextParallelConfig
from pipelines import bare_call, denoiser, make

import tomadiff
from tomadiff.errors import ConfigError


def main(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2
    )
    # diffusers numbers accelerators even where it then takes the CPU
    torch.accelerator.device_count = lambda: 1
    model = tomadiff.apply(denoiser(make("flux")), ratio=0.5)
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    try:
        model(**bare_call(model))
    except ConfigError as error:
        (folder / str(rank)).write_text(str(error))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":  # forked after the imports, which take longer than all the rest
    other = os.fork()
    main(0 if other else 1, Path(sys.argv[1]))
    if other:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
