"""Who uses the pipeline of the page: one at a time; what they get is kept, and can be stopped."""

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
from tomadiff.tools.loading import load, usual_size
from tomadiff.tools.method_spec import configuration, pairs

from .easel import Cancelled, Easel, Part, Tell
from .listeners import Listeners
from .results import Comparison, Drawn, Kept, Sweep
from .wish import Limits, Wish


class Studio:
    """A pipeline, and who uses it now. Everything that draws goes through `_working`."""

    def __init__(
        self,
        model: str,
        device: str = "cpu",
        dtype: str = "fp32",
        side: int | None = None,
        steps: int = 100,
        trust_remote_code: bool = False,
    ) -> None:
        self.own_model, self.device, self.dtype = model, device, dtype
        self._trusts_own = trust_remote_code  # never a model that the page chose
        self._side, self._steps = side, steps
        self._alone = threading.Lock()
        self._worker: str | None = None
        self._stop = threading.Event()
        self._recalled: Kept[bool] = Kept(64)  # who waits for a turn that is no longer wanted
        self._dense: Kept[Drawn] = Kept(32)
        self._results: Kept[Comparison | Sweep] = Kept(16)
        self._closed = False
        self.listeners: Listeners | None = None  # None: whoever asks is there
        self._take(model)

    def _take(self, model: str) -> None:
        trusted = self._trusts_own and model == self.own_model
        pipe = load(model, self.device, self.dtype, trust_remote_code=trusted)
        if "callback_on_step_end" not in inspect.signature(pipe.__call__).parameters:
            raise ValueError(
                f"{type(pipe).__name__} takes no callback_on_step_end, so it can't be watched or stopped: "
                "use tomadiff generate"
            )
        self.family = family_of(denoiser(pipe)[0])
        pipe.set_progress_bar_config(disable=True)
        self.pipe, self.model, self._easel = pipe, model, Easel(pipe, self._stopped)
        self.usual_size = usual_size(pipe) or (512, 512)
        self.usual_steps = inspect.signature(pipe.__call__).parameters["num_inference_steps"].default
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
        """Whether what is under way was cancelled, or nobody is there any more to see it."""
        return self._stop.is_set() or not self._there(self._worker or "")

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
            del self.pipe, self._easel
            try:
                self._take(model)
            except BaseException:
                self._take(before)
                raise

    def notes(self, wish: Wish) -> dict[str, Any]:
        """Where a settings file comes from."""
        about = {"model": self.model, "device": self.device, "dtype": self.dtype}
        return about | {"steps": wish.request.steps, "size": list(wish.request.size or ())}

    def result(self, name: str | None) -> Comparison | Sweep | None:
        return self._results.get(name)

    def compare(self, wish: Wish, who: str, tell: Tell) -> tuple[str, Comparison]:
        """Dense and merged from the same noise, and the name under which it is kept for a while."""
        config = wish.config(self.family)  # complains before anything long starts
        with self._working(who):
            dense, was_kept = self._dense_picture(wish.request, Part(tell, 0, 0.5))
            part = Part(tell, 0 if was_kept else 0.5, 1)
            merged, maps, no_maps = self._easel.merged(wish.request, wish.way, config, dense, part)
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
                cells[way, ratio], *_ = self._easel.merged(wish.request, way, config, dense, part, maps=False)
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
        drawn = self._easel.dense(request, part)
        self._dense.put(key, drawn)
        return drawn, False
