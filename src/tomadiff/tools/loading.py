"""A pipeline by name."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

from tomadiff.runtime.registration import denoiser

from .demo.embedded import EMBEDDED, load_embedded

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps, ... (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="fp32", help="of the weights (default: %(default)s)"
    )


def check_device(device: str) -> None:
    try:
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"can't use device {device!r} here: {reason}") from error


def load(
    model: str, device: str = "cpu", dtype: str = "fp32", names: Iterable[str] = EMBEDDED
) -> DiffusionPipeline:
    """An embedded model by its name, or any pipeline by hub id or folder. `names`: what the caller knows."""
    check_device(device)
    if model in EMBEDDED:
        return load_embedded(model, DTYPES[dtype]).to(device)
    if Path(model).is_file():
        raise ValueError(
            f"can't load {model!r}: it is a single file, and a folder is needed, which "
            "SomePipeline.from_single_file(FILE).save_pretrained(FOLDER) of diffusers makes"
        )
    try:
        return DiffusionPipeline.from_pretrained(model, dtype=DTYPES[dtype]).to(device)
    # the last two where the pipeline is of a class that this diffusers doesn't have, or its index is no index
    except (OSError, ValueError, AttributeError, TypeError) as error:
        if Path(model).is_dir():
            tried = "no pipeline in this folder that diffusers can read"
        else:
            tried = f"no folder, no hub id within reach, and none of {', '.join(names)}"
        # where the hub is out of reach, what is raised is a long advice, and its cause says why
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ValueError(f"can't load {model!r}: {tried} ({reason})") from error


def usual_size(pipe: DiffusionPipeline) -> tuple[int, int] | None:
    """Height and width of what it draws where nobody asks for more; None where it doesn't say."""
    side = inspect.signature(pipe.__call__).parameters["height"].default
    if side is None:  # then it is what the model was trained on
        side = getattr(pipe, "default_sample_size", None) or denoiser(pipe)[0].config.get("sample_size", 0)
        side *= getattr(pipe, "vae_scale_factor", 0)
    return (side, side) if side else None
