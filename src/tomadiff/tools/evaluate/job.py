"""What an evaluation draws: each prompt and seed with every contender, from the same noise."""

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

Contender = tuple[str, float]  # a method (see method_spec) and a ratio
REFERENCE: Contender = (DENSE, 0.0)


@dataclass(frozen=True)
class Job:
    """Everything that the pictures depend on, except prompts and seeds."""

    model: str
    contenders: tuple[Contender, ...]  # dense first
    steps: int | None = None
    size: tuple[int, int] | None = None
    guidance: float | None = None
    scheduler: str | None = None  # a name in `samplers`; None for the pipeline's own
    dtype: str = "fp32"
    device: str = "cpu"
    threads: int | None = None
    settings: dict[Contender, dict[str, Any]] = field(default_factory=dict)  # see `resolved`
    versions: dict[str, str] = field(default_factory=versions)
    # what pictures don't depend on
    trust_remote_code: bool = False
    offload: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON: each contender with its settings."""
        apart = ("contenders", "settings", "trust_remote_code", "offload")
        found = {name: value for name, value in asdict(self).items() if name not in apart}
        found["size"] = list(self.size) if self.size else None
        return found | {
            "contenders": {
                label(*contender): self.settings.get(contender, {}) for contender in self.contenders
            }
        }


@dataclass(frozen=True)
class Work:
    """One prompt and seed, and the contenders that have not drawn it yet."""

    prompt: str
    seed: int
    contenders: tuple[Contender, ...]
    counted: tuple[Contender, ...] = ()  # those of them whose FLOPs are counted, too


@dataclass(frozen=True)
class Drawing:
    """One picture, as a PNG."""

    prompt: str
    seed: int
    method: str
    ratio: float
    seconds: float
    process: str  # that drew it: times compare only within one
    png: bytes
    flops: int | None = None  # of the denoiser, where they were counted

    @property
    def label(self) -> str:
        return label(self.method, self.ratio)


class ImageGenerator:
    """A pipeline that draws for a job, in one process."""

    def __init__(self, job: Job) -> None:
        if job.threads:
            torch.set_num_threads(job.threads)
        self.job = job
        self.process = uuid.uuid4().hex[:12]
        trusted, offload = job.trust_remote_code, job.offload
        self.pipe = load(job.model, job.device, job.dtype, trust_remote_code=trusted, offload=offload)
        self.pipe.set_progress_bar_config(disable=True)
        if job.scheduler:
            self.pipe.scheduler = scheduler_by_name(job.scheduler, self.pipe.scheduler)
        self.warm: set[Contender] = set()

    def draw(self, work: Work, contender: Contender) -> Drawing:
        job = self.job
        dense = Request(work.prompt, work.seed, job.steps, job.size, job.guidance)
        request = replace(dense, steps=steps_of(contender[0]) or job.steps)
        if contender not in self.warm:  # warm up, so that the first picture's time is not longer
            calibrate(self.pipe, contender[0], lambda: draw(self.pipe, dense))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they come again with the picture itself
                short = (
                    request if lists_steps(contender[0]) else replace(request, steps=2)
                )  # one may be dense
                self._once(contender, short)
            self.warm.add(contender)
        picture, seconds = self._once(contender, request)  # put on anew: nothing of the warm-up is left
        flops = None
        if contender in work.counted:
            with counted(self.pipe) as counts:
                self._once(contender, request)
            flops = counts.flops
        return Drawing(work.prompt, work.seed, *contender, seconds, self.process, encode(picture), flops)

    def _once(self, contender: Contender, request: Request) -> tuple[Image.Image, float]:
        torch.manual_seed(request.seed)  # for methods that draw random numbers, as tomesd does
        with switched_on(self.pipe, *contender):
            return draw(self.pipe, request)


def encode(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()
