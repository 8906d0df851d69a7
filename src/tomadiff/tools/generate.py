"""Generate pictures with any diffusers pipeline, time it, and save them with their settings."""

from __future__ import annotations

import inspect
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tomadiff.runtime.files import atomic_write, check_writable


@dataclass(frozen=True)
class Request:
    """What to ask a pipeline for; None means the pipeline's default."""

    prompt: str
    seed: int = 0
    steps: int | None = None
    size: tuple[int, int] | None = None  # height, width
    guidance: float | None = None


def draw(pipe: DiffusionPipeline, request: Request, **more: Any) -> tuple[Image.Image, float]:
    """Draw a picture; returns it and the seconds it took. `more` is passed on to the pipeline."""
    if request.steps is not None and request.steps < 1:
        raise ValueError(f"{request.steps} steps: there must be at least 1")
    wanted = {"num_inference_steps": request.steps, "guidance_scale": request.guidance}
    if request.size is not None:
        wanted |= {"height": request.size[0], "width": request.size[1]}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    takes = inspect.signature(pipe.__call__).parameters
    if "num_frames" in takes:
        raise ValueError(f"{type(pipe).__name__} makes videos, and this draws pictures: call it from Python")
    missing = [name for name in wanted if name not in takes]
    if missing:
        raise ValueError(f"{type(pipe).__name__} takes no {' or '.join(missing)}: leave it out")
    # the generator is on the CPU, so that a seed means the same noise on every device
    generator = torch.Generator().manual_seed(request.seed)
    start = time.perf_counter()
    images = pipe(request.prompt, generator=generator, **wanted, **more).images
    return images[0], time.perf_counter() - start


def check_output(path: Path) -> None:
    """Raise if the output can't be written, before any work is done for it."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"{path} must be a .png: the settings are written into it")
    check_writable(path)


def save(picture: Image.Image, path: Path, settings: dict[str, Any]) -> None:
    """Write a PNG with the settings inside it, atomically."""
    info = PngInfo()
    info.add_text("tomadiff", json.dumps(settings))
    atomic_write(path, lambda partial: picture.save(partial, "PNG", pnginfo=info))
