"""An evaluation as work to do: for each prompt and seed, the same noise in every way."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from PIL import Image

from ..generate import Request, draw
from ..load import load
from ..named import DENSE, label, switched_on

Way = tuple[str, float]  # a name (see `named`) and a ratio
REFERENCE: Way = (DENSE, 0.0)


@dataclass(frozen=True)
class Job:
    """All that the pictures depend on, but the prompts."""

    model: str
    ways: tuple[Way, ...]  # the dense one first
    steps: int | None = None
    size: tuple[int, int] | None = None
    guidance: float | None = None
    dtype: str = "fp32"
    device: str = "cpu"
    threads: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Work:
    """One prompt and seed, and the ways in which it is still to be drawn."""

    number: int  # of the prompt
    prompt: str
    seed: int
    ways: tuple[Way, ...]


@dataclass(frozen=True)
class Drawing:
    """One picture, as a PNG."""

    number: int
    prompt: str
    seed: int
    way: str
    ratio: float
    seconds: float
    png: bytes

    @property
    def label(self) -> str:
        return label(self.way, self.ratio)


class Painter:
    """A pipeline that does work."""

    def __init__(self, job: Job) -> None:
        if job.threads:
            torch.set_num_threads(job.threads)
        self.job = job
        self.pipe = load(job.model, job.device, job.dtype)
        self.pipe.set_progress_bar_config(disable=True)
        self.warm = False

    def draw(self, work: Work) -> Iterator[Drawing]:
        """Picture by picture; dense and merged ones alternate, so that their times compare."""
        job = self.job
        request = Request(work.prompt, work.seed, job.steps, job.size, job.guidance)
        if not self.warm:  # whoever goes first pays for warming up
            draw(self.pipe, Request(work.prompt, work.seed, 1, job.size, job.guidance))
            self.warm = True
        for way, ratio in work.ways:
            torch.manual_seed(work.seed)  # for ways that draw random numbers of their own, as tomesd does
            with switched_on(self.pipe, way, ratio):
                picture, seconds = draw(self.pipe, request)
            yield Drawing(work.number, work.prompt, work.seed, way, ratio, seconds, encode(picture))


def encode(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def decode(png: bytes) -> torch.Tensor:
    """[3, H, W] in [0, 1]."""
    with Image.open(io.BytesIO(png)) as picture:
        pixels = torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8)
        return pixels.reshape(picture.height, picture.width, 3).permute(2, 0, 1) / 255
