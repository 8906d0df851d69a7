"""Where pictures are made for the page: one at a time, dense ones kept, and stopped when asked to."""

from __future__ import annotations

import inspect
import secrets
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from diffusers import DiffusionPipeline
from PIL import Image

import tomadiff

from ..attachment import denoiser
from ..config import Config
from ..demo.show import as_tensor
from ..errors import ConfigError
from ..families import family_of
from ..generate import Request, draw
from ..load import load, usual_size
from ..machine import wait_for
from ..maps import MergeMap, Recorder
from ..named import configuration, pairs
from ..quality.metrics import psnr, ssim
from .wish import Limits, Wish

Tell = Callable[[float, str], None]  # the share that is done, and what is under way
Value = TypeVar("Value")


class Cancelled(Exception):
    """Somebody asked to stop."""


@dataclass(frozen=True)
class Drawn:
    picture: Image.Image
    seconds: float


@dataclass(frozen=True)
class Merged(Drawn):
    """A picture from merged tokens, beside the dense one."""

    config: Config
    tokens: int  # of the finest grid
    kept: int  # of these, in a merged step
    steps: int
    merged_steps: int
    psnr: float  # infinite where nothing changed
    ssim: float


@dataclass(frozen=True)
class Comparison:
    wish: Wish
    dense: Drawn
    merged: Merged
    dense_was_kept: bool
    maps: dict[int, MergeMap]  # by step; dense steps have none
    no_maps: str = ""  # why there are none at all

    @property
    def speedup(self) -> float:
        return self.dense.seconds / self.merged.seconds


@dataclass(frozen=True)
class Sweep:
    wish: Wish
    dense: Drawn
    cells: dict[tuple[str, float], Merged]  # by way and ratio
    left_out: list[str]  # and why


class Kept(Generic[Value]):
    """The newest few, by name."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.values: OrderedDict[Any, Value] = OrderedDict()

    def get(self, name: Any) -> Value | None:
        if name in self.values:
            self.values.move_to_end(name)
        return self.values.get(name)

    def take(self, name: Any) -> Value | None:
        return self.values.pop(name, None)

    def put(self, name: Any, value: Value) -> None:
        self.values[name] = value
        self.values.move_to_end(name)
        while len(self.values) > self.most:
            self.values.popitem(last=False)


class Studio:
    """A pipeline, and who uses it now. Everything that draws goes through `_working`."""

    def __init__(
        self, model: str, device: str = "cpu", dtype: str = "fp32", side: int | None = None, steps: int = 100
    ) -> None:
        self.own_model, self.device, self.dtype = model, device, dtype
        self._side, self._steps = side, steps
        self._alone = threading.Lock()
        self._worker: str | None = None
        self._stop = threading.Event()
        self._recalled: Kept[bool] = Kept(64)  # who waits for a turn that is no longer wanted
        self._dense: Kept[Drawn] = Kept(32)
        self._results: Kept[Comparison | Sweep] = Kept(16)
        self._warm: set[tuple] = set()
        self._closed = False
        self._take(model)

    def _take(self, model: str) -> None:
        pipe = load(model, self.device, self.dtype)
        if "callback_on_step_end" not in inspect.signature(pipe.__call__).parameters:
            raise ValueError(
                f"{type(pipe).__name__} takes no callback_on_step_end, so it can't be watched or stopped: "
                "use tomadiff generate"
            )
        self.family = family_of(denoiser(pipe)[0])
        pipe.set_progress_bar_config(disable=True)
        self.pipe, self.model = pipe, model
        self.usual_size = usual_size(pipe) or (512, 512)
        self.usual_steps = inspect.signature(pipe.__call__).parameters["num_inference_steps"].default
        # the models draw well up to about twice the side that they were trained on
        self.limits = Limits(side=self._side or 2 * max(self.usual_size), steps=self._steps)

    @contextmanager
    def _working(self, who: str) -> Iterator[None]:
        with self._alone:
            if self._closed or self._recalled.take(who):
                raise Cancelled
            self._stop.clear()
            self._worker = who
            try:
                yield
            finally:
                self._worker = None

    def expect(self, who: str) -> None:
        """Somebody is about to ask for something: a cancel from before is not meant for that."""
        self._recalled.take(who)

    def cancel(self, who: str) -> None:
        """Stop what somebody asked for, at its next step or before it starts; nobody can stop another's."""
        if self._worker == who:
            self._stop.set()
        else:
            self._recalled.put(who, True)

    def close(self) -> None:
        """Stop what is under way, wait for it, and start nothing more."""
        self._closed = True
        self._stop.set()
        with self._alone:
            pass

    def use_model(self, model: str, who: str) -> None:
        """Take another model; the old one goes first, as two may not fit."""
        with self._working(who):
            if model == self.model:
                return
            before = self.model
            del self.pipe
            self._warm.clear()
            try:
                self._take(model)
            except BaseException:
                self._take(before)
                raise

    def result(self, name: str | None) -> Comparison | Sweep | None:
        return self._results.get(name)

    def compare(self, wish: Wish, who: str, tell: Tell) -> tuple[str, Comparison]:
        """Dense and merged from the same noise, and the name under which it is kept for a while."""
        config = wish.config(self.family)  # complains before anything long starts
        with self._working(who):
            dense, was_kept = self._dense_picture(wish.request, Part(tell, 0, 0.5))
            merged, recorder, no_maps = self._merged_picture(
                wish.request, wish.way, config, dense, Part(tell, 0 if was_kept else 0.5, 1)
            )
            maps = {mapped.step: mapped for mapped in recorder.maps} if recorder else {}
            result = Comparison(wish, dense, merged, was_kept, maps, no_maps)
            return self._keep(result), result

    def sweep(
        self, wish: Wish, ways: Sequence[str], ratios: Sequence[float], who: str, tell: Tell
    ) -> tuple[str, Sweep]:
        """Every way at every ratio that it can do."""
        wanted, left_out = pairs(ways, ratios, self.family)
        if len(wanted) > self.limits.cells:
            raise ValueError(
                f"That makes {len(wanted)} pictures; at most {self.limits.cells} are allowed: choose fewer."
            )
        with self._working(who):
            share = 1 / (len(wanted) + 1)
            dense, _ = self._dense_picture(wish.request, Part(tell, 0, share))
            cells = {}
            for number, (way, ratio) in enumerate(wanted, 1):
                config = configuration(way, ratio, self.family)
                part = Part(tell, number * share, (number + 1) * share)
                cells[way, ratio] = self._merged_picture(wish.request, way, config, dense, part, maps=False)[
                    0
                ]
            result = Sweep(wish, dense, cells, left_out)
            return self._keep(result), result

    def _keep(self, result: Comparison | Sweep) -> str:
        name = secrets.token_urlsafe(12)  # nobody can guess another's
        self._results.put(name, result)
        return name

    def _dense_picture(self, request: Request, part: Part) -> tuple[Drawn, bool]:
        key = (self.model, request)
        kept = self._dense.get(key)
        if kept is not None:
            return kept, True
        self._warm_up(request, "dense", part)
        drawn = Drawn(*self._timed(request, "dense", part, None))
        self._dense.put(key, drawn)
        return drawn, False

    def _merged_picture(
        self, request: Request, way: str, config: Config, dense: Drawn, part: Part, maps: bool = True
    ) -> tuple[Merged, Recorder | None, str]:
        recorder, no_maps = None, ""
        with tomadiff.merged(self.pipe, config):
            self._warm_up(request, way, part)
        with tomadiff.merged(self.pipe, config):  # anew: nothing of the warm-up may be left
            if maps:
                try:
                    recorder = Recorder(self.pipe)
                except ConfigError as error:
                    no_maps = str(error)
            picture, seconds = self._timed(request, f"{way} at {config.ratio:g}", part, recorder)
            report = tomadiff.report(self.pipe)
        finest = max(report.sites, key=lambda site: site.tokens)
        merged_calls = finest.calls - finest.dense_calls if config.ratio else 0
        pictures = as_tensor([dense.picture]), as_tensor([picture])
        merged = Merged(
            picture=picture,
            seconds=seconds,
            config=config,
            tokens=finest.tokens,
            kept=finest.kept,
            steps=request.steps,
            merged_steps=round(request.steps * merged_calls / finest.calls),  # guidance may call twice
            psnr=psnr(*pictures).item(),
            ssim=ssim(*pictures).item(),
        )
        return merged, recorder, no_maps

    def _warm_up(self, request: Request, way: str, part: Part) -> None:
        """Whoever goes first pays for warming up, so nobody's time counts then."""
        key = (request.size, way)
        if key not in self._warm:
            part.tell(0, f"{way}: warming up")
            with warnings.catch_warnings():  # one step may well be dense
                warnings.simplefilter("ignore")
                draw(self.pipe, replace(request, steps=1), callback_on_step_end=self._watch)
            self._warm.add(key)

    def _watch(
        self, pipe: DiffusionPipeline, step: int, timestep: Any, inputs: dict[str, Any]
    ) -> dict[str, Any]:
        if self._stop.is_set():
            raise Cancelled
        return inputs

    def _timed(
        self, request: Request, what: str, part: Part, recorder: Recorder | None
    ) -> tuple[Image.Image, float]:
        """A picture and its seconds, without those that go into watching it."""
        watching = 0.0

        def callback(pipe: Any, step: int, timestep: Any, inputs: dict[str, Any]) -> dict[str, Any]:
            nonlocal watching
            if pipe._execution_device.type != "cpu":
                wait_for(pipe._execution_device)  # what it still works on is the picture's time
            start = time.perf_counter()
            inputs = self._watch(pipe, step, timestep, inputs)
            if recorder is not None:
                inputs = recorder(pipe, step, timestep, inputs)
            part.tell((step + 1) / request.steps, f"{what}: step {step + 1} of {request.steps}")
            watching += time.perf_counter() - start
            return inputs

        part.tell(0, what)
        picture, seconds = draw(self.pipe, request, callback_on_step_end=callback)
        return picture, seconds - watching


@dataclass(frozen=True)
class Part:
    """A part of the work, which tells how far the whole is."""

    whole: Tell
    start: float
    end: float

    def tell(self, share: float, text: str) -> None:
        self.whole(min(1.0, self.start + share * (self.end - self.start)), text)
