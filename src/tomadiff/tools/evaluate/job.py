"""An evaluation as work to do: for each prompt and seed, the same noise in every way."""

from __future__ import annotations

import io
import uuid
import warnings
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from PIL import Image

from tomadiff.runtime.machine import versions
from tomadiff.tools.denoiser_flops import counted
from tomadiff.tools.generate import Request, draw
from tomadiff.tools.loading import load
from tomadiff.tools.method_spec import DENSE, calibrate, label, lists_steps, steps_of, switched_on
from tomadiff.tools.samplers import scheduler_by_name

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
    scheduler: str | None = None  # by name (see `samplers`); None is the pipeline's own
    dtype: str = "fp32"
    device: str = "cpu"
    threads: int | None = None
    settings: dict[Way, dict[str, Any]] = field(default_factory=dict)  # see `resolved`
    versions: dict[str, str] = field(default_factory=versions)
    # which pictures don't depend on
    trust_remote_code: bool = False
    offload: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As for JSON: each way with its settings."""
        apart = ("ways", "settings", "trust_remote_code", "offload")
        found = {name: value for name, value in asdict(self).items() if name not in apart}
        found["size"] = list(self.size) if self.size else None
        return found | {"ways": {label(*way): self.settings.get(way, {}) for way in self.ways}}


@dataclass(frozen=True)
class Work:
    """One prompt and seed, and the ways in which it is still to be drawn."""

    prompt: str
    seed: int
    ways: tuple[Way, ...]
    counted: tuple[Way, ...] = ()  # those of them whose work is counted, too


@dataclass(frozen=True)
class Drawing:
    """One picture, as a PNG."""

    prompt: str
    seed: int
    way: str
    ratio: float
    seconds: float
    painter: str  # times compare only if one painter took both
    png: bytes
    flops: int | None = None  # of the denoiser, where they were counted

    @property
    def label(self) -> str:
        return label(self.way, self.ratio)


class Painter:
    """A pipeline that does work, in one process and one session."""

    def __init__(self, job: Job) -> None:
        if job.threads:
            torch.set_num_threads(job.threads)
        self.job = job
        self.name = uuid.uuid4().hex[:12]
        trusted, offload = job.trust_remote_code, job.offload
        self.pipe = load(job.model, job.device, job.dtype, trust_remote_code=trusted, offload=offload)
        self.pipe.set_progress_bar_config(disable=True)
        if job.scheduler:
            self.pipe.scheduler = scheduler_by_name(job.scheduler, self.pipe.scheduler)
        self.warm: set[Way] = set()

    def draw(self, work: Work, way: Way) -> Drawing:
        job = self.job
        dense = Request(work.prompt, work.seed, job.steps, job.size, job.guidance)
        request = replace(dense, steps=steps_of(way[0]) or job.steps)
        if way not in self.warm:  # whoever goes first pays for warming up
            calibrate(self.pipe, way[0], lambda: draw(self.pipe, dense))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the picture itself will tell
                short = request if lists_steps(way[0]) else replace(request, steps=2)  # one may be dense
                self._once(way, short)
            self.warm.add(way)
        picture, seconds = self._once(way, request)  # anew: nothing of the warm-up may be left
        flops = None
        if way in work.counted:
            with counted(self.pipe) as counts:
                self._once(way, request)
            flops = counts.flops
        return Drawing(work.prompt, work.seed, *way, seconds, self.name, encode(picture), flops)

    def _once(self, way: Way, request: Request) -> tuple[Image.Image, float]:
        torch.manual_seed(request.seed)  # for ways that draw random numbers of their own, as tomesd does
        with switched_on(self.pipe, *way):
            return draw(self.pipe, request)


def encode(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()
