"""Draw a picture: with a warm-up, timed, reporting each step, and stopped on request."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from diffusers import DiffusionPipeline

import tomadiff
from tomadiff.config import Config
from tomadiff.errors import ConfigError
from tomadiff.runtime.machine import wait_for
from tomadiff.tools.evaluate.metrics import psnr, ssim
from tomadiff.tools.evaluate.pictures import as_tensor
from tomadiff.tools.generate import Request, draw
from tomadiff.tools.merge_map import MergeMap, Recorder

from .results import Drawn, Merged

Tell = Callable[[float, str], None]  # called with the share that is done, and the current activity


class Cancelled(Exception):
    """Somebody asked to stop."""


@dataclass(frozen=True)
class Part:
    """A part of the work, which reports the progress of the whole."""

    whole: Tell
    start: float
    end: float

    def tell(self, share: float, text: str) -> None:
        self.whole(min(1.0, self.start + share * (self.end - self.start)), text)


class Runner:
    """Draws with one pipeline, dense and merged; raises `Cancelled` at the first step at which `stopped`."""

    def __init__(self, pipe: DiffusionPipeline, stopped: Callable[[], bool]) -> None:
        self.pipe, self.stopped = pipe, stopped
        self._warm: set[tuple] = set()

    def dense(self, request: Request, part: Part) -> Drawn:
        self._warm_up(request, "dense", part)
        return self._timed(request, "dense", part, None)

    def merged(
        self, request: Request, method: str, config: Config, dense: Drawn, part: Part, maps: bool = True
    ) -> tuple[Merged, dict[int, MergeMap], str]:
        """Also returns the maps of merged steps, or the reason why there are none."""
        assert request.steps is not None, "the page always asks for a number of steps"
        recorder, no_maps = None, ""
        with tomadiff.merged(self.pipe, config):
            self._warm_up(request, method, part)
        with tomadiff.merged(self.pipe, config):  # put on anew: nothing of the warm-up is left
            if maps:
                try:
                    recorder = Recorder(self.pipe)
                except ConfigError as error:
                    no_maps = str(error)
            drawn = self._timed(request, f"{method} at {config.resolve().ratio:g}", part, recorder)
            report = tomadiff.report(self.pipe)
        finest = max(report.sites, key=lambda site: site.tokens, default=None)
        merged_calls = finest.calls - finest.dense_calls if finest else 0
        pictures = as_tensor([dense.picture]), as_tensor([drawn.picture])
        merged = Merged(
            picture=drawn.picture,
            seconds=drawn.seconds,
            config=config,
            settings=report.settings,
            tokens=finest.tokens if finest else 0,
            kept=finest.kept if finest else 0,
            steps=request.steps,
            # guidance may call twice; steps that are forecast are not merged
            merged_steps=round(report.steps["run"] * merged_calls / finest.calls) if finest else 0,
            psnr=psnr(*pictures).item(),
            ssim=ssim(*pictures).item(),
        )
        return merged, {mapped.step: mapped for mapped in recorder.maps} if recorder else {}, no_maps

    def _warm_up(self, request: Request, method: str, part: Part) -> None:
        """Draw one step before anything is timed: the first one is slower."""
        key = (request.size, method)
        if key not in self._warm:
            part.tell(0, f"{method}: warming up")
            with warnings.catch_warnings():  # a warning that this one step is dense would mislead
                warnings.simplefilter("ignore")
                draw(self.pipe, replace(request, steps=1), callback_on_step_end=self._watch)
            self._warm.add(key)

    def _watch(
        self, pipe: DiffusionPipeline, step: int, timestep: Any, inputs: dict[str, Any]
    ) -> dict[str, Any]:
        if self.stopped():
            self.pipe.maybe_free_model_hooks()  # models that are offloaded go back, as after a whole picture
            raise Cancelled
        return inputs

    def _timed(self, request: Request, what: str, part: Part, recorder: Recorder | None) -> Drawn:
        """The seconds don't include those spent on progress and maps."""
        assert request.steps is not None, "the page always asks for a number of steps"
        steps, watching = request.steps, 0.0

        def callback(pipe: Any, step: int, timestep: Any, inputs: dict[str, Any]) -> dict[str, Any]:
            nonlocal watching
            wait_for(pipe._execution_device)  # pending work belongs to the picture's time
            start = time.perf_counter()
            inputs = self._watch(pipe, step, timestep, inputs)
            if recorder is not None:
                inputs = recorder(pipe, step, timestep, inputs)
            part.tell((step + 1) / steps, f"{what}: step {step + 1} of {steps}")
            watching += time.perf_counter() - start
            return inputs

        part.tell(0, what)
        picture, seconds = draw(self.pipe, request, callback_on_step_end=callback)
        return Drawn(picture, seconds - watching)
