"""The pipeline of the page: one user at a time; results are kept for a while, and work can be cancelled."""

from __future__ import annotations

import inspect
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tomadiff.models import family_of
from tomadiff.runtime.registration import denoiser
from tomadiff.tools.generate import Request
from tomadiff.tools.loading import load, usual_size, usual_steps
from tomadiff.tools.method_spec import configuration, pairs

from .generation import GenerationRequest, Limits
from .listeners import Listeners
from .results import Comparison, Drawn, Kept, Sweep
from .runner import Cancelled, Part, Runner, Tell


class Studio:
    """A pipeline and its current user. Everything that draws goes through `_working`."""

    def __init__(
        self,
        model: str,
        device: str = "cpu",
        dtype: str = "fp32",
        side: int | None = None,
        steps: int = 100,
        trust_remote_code: bool = False,
        offload: str | None = None,
    ) -> None:
        self.own_model, self.device, self.dtype, self.offload = model, device, dtype, offload
        self._trusts_own = trust_remote_code  # but never a model chosen on the page
        self._side, self._steps = side, steps
        self._alone = threading.Lock()
        self._worker: str | None = None
        self._stop = threading.Event()
        self._recalled: Kept[bool] = Kept(64)  # users who cancelled while waiting for their turn
        self._dense: Kept[Drawn] = Kept(32)
        self._results: Kept[Comparison | Sweep] = Kept(16)
        self._closed = False
        self.listeners: Listeners | None = None  # None: users are taken to be connected
        self._take(model)

    def _take(self, model: str) -> None:
        trusted = self._trusts_own and model == self.own_model
        pipe = load(model, self.device, self.dtype, trust_remote_code=trusted, offload=self.offload)
        if "callback_on_step_end" not in inspect.signature(pipe.__call__).parameters:
            raise ValueError(
                f"{type(pipe).__name__} takes no callback_on_step_end, so it can't be watched or stopped: "
                "use tomadiff generate"
            )
        self.family = family_of(denoiser(pipe)[0])
        pipe.set_progress_bar_config(disable=True)
        self.pipe, self.model, self._runner = pipe, model, Runner(pipe, self._stopped)
        self.usual_size = usual_size(pipe) or (512, 512)
        self.usual_steps = usual_steps(pipe)
        # the models draw well up to about twice the side that they were trained on
        self.limits = Limits(side=self._side or 2 * max(self.usual_size), steps=self._steps)

    @contextmanager
    def _working(self, who: str) -> Iterator[None]:
        with self._alone:
            if self._closed or self._recalled.take(who) or not self._there(who):
                raise Cancelled
            self._stop.clear()
            self._worker = who
            try:
                yield
            finally:
                self._worker = None

    def _there(self, who: str) -> bool:
        return self.listeners is None or self.listeners.there(who)

    def _stopped(self) -> bool:
        """Whether the current work was cancelled, or its user is gone."""
        return self._stop.is_set() or not self._there(self._worker or "")

    def expect(self, who: str) -> None:
        """A new request of a user is about to come: forget a cancellation from before."""
        self._recalled.take(who)

    def cancel(self, who: str) -> None:
        """Cancel a user's own work, at its next step or before it starts."""
        if self._worker == who:
            self._stop.set()
        else:
            self._recalled.put(who, True)

    def close(self) -> None:
        """Cancel the current work, wait for its end, and start nothing more."""
        self._closed = True
        self._stop.set()
        with self._alone:
            pass

    def use_model(self, model: str, who: str) -> None:
        """Load another model; the old one is freed first, since both may not fit into memory."""
        with self._working(who):
            if model == self.model:
                return
            before = self.model
            del self.pipe, self._runner
            try:
                self._take(model)
            except BaseException:
                self._take(before)
                raise

    def notes(self, generation: GenerationRequest) -> dict[str, Any]:
        """Notes for a settings file on where it comes from."""
        about = {"model": self.model, "device": self.device, "dtype": self.dtype}
        return about | {"steps": generation.request.steps, "size": list(generation.request.size or ())}

    def result(self, name: str | None) -> Comparison | Sweep | None:
        return self._results.get(name)

    def compare(self, generation: GenerationRequest, who: str, tell: Tell) -> tuple[str, Comparison]:
        """Draw dense and merged from the same noise. Also returns the name under which the result is kept."""
        config = generation.config(self.family)  # raises before anything long starts
        with self._working(who):
            dense, was_kept = self._dense_picture(generation.request, Part(tell, 0, 0.5))
            part = Part(tell, 0 if was_kept else 0.5, 1)
            merged, maps, no_maps = self._runner.merged(
                generation.request, generation.spec, config, dense, part
            )
            result = Comparison(generation, dense, merged, was_kept, maps, no_maps)
            return self._keep(result), result

    def sweep(
        self,
        generation: GenerationRequest,
        methods: Sequence[str],
        ratios: Sequence[float],
        who: str,
        tell: Tell,
    ) -> tuple[str, Sweep]:
        """Draw with every method at every ratio that it can do."""
        wanted, left_out = pairs(methods, ratios, self.family)
        if len(wanted) > self.limits.cells:
            raise ValueError(
                f"That makes {len(wanted)} pictures; at most {self.limits.cells} are allowed: choose fewer."
            )
        with self._working(who):
            share = 1 / (len(wanted) + 1)
            dense, _ = self._dense_picture(generation.request, Part(tell, 0, share))
            cells = {}
            for number, (method, ratio) in enumerate(wanted, 1):
                config = configuration(method, ratio, self.family)
                part = Part(tell, number * share, (number + 1) * share)
                cells[method, ratio], *_ = self._runner.merged(
                    generation.request, method, config, dense, part, maps=False
                )
            result = Sweep(generation, dense, cells, left_out)
            return self._keep(result), result

    def _keep(self, result: Comparison | Sweep) -> str:
        name = secrets.token_urlsafe(12)  # can't be guessed by other users
        self._results.put(name, result)
        return name

    def _dense_picture(self, request: Request, part: Part) -> tuple[Drawn, bool]:
        key = (self.model, request)
        kept = self._dense.get(key)
        if kept is not None:
            return kept, True
        drawn = self._runner.dense(request, part)
        self._dense.put(key, drawn)
        return drawn, False
