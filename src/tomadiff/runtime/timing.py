"""How much time a model's calls take, and how much of it planning, merging and unmerging."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from .machine import wait_for

CPU = torch.device("cpu")


class Times:
    """Seconds by phase, measured while the work is done."""

    def __init__(self) -> None:
        self.seconds = {"plan": 0.0, "merge": 0.0, "unmerge": 0.0, "model": 0.0}
        self.phase: str | None = None  # the current phase; None for the model itself
        self.synchronise = False  # wait for the device around each phase: slow, but exact
        self.known = True  # False once a phase ran on an asynchronous device
        self._phases = {phase: _Phase(self, phase) for phase in ("plan", "merge", "unmerge")}

    def spent(self, on: str, device: torch.device) -> AbstractContextManager[None]:
        """Add the time of a `with` block. Exact on a CPU only, since other devices run asynchronously."""
        phase = self._phases[on]
        phase.device = device
        return phase

    def overhead(self, on: str, device: torch.device) -> AbstractContextManager[None]:
        """The same for our own work, whose precision autocast must not change."""
        if torch._C._is_any_autocast_enabled():  # for any device, which costs far less than to ask for one
            return self._without_autocast(on, device)
        return self.spent(on, device)

    @contextlib.contextmanager
    def _without_autocast(self, on: str, device: torch.device) -> Iterator[None]:
        with self.spent(on, device), torch.autocast(device.type, enabled=False):
            yield


class _Phase(AbstractContextManager[None]):
    """One object a phase, for speed: it is entered many times in a call of a model, never twice at once."""

    __slots__ = ("_on", "_start", "_times", "device")

    def __init__(self, times: Times, on: str) -> None:
        self._times, self._on, self.device = times, on, CPU

    def __enter__(self) -> None:
        if self._times.synchronise:
            wait_for(self.device)
        self._times.phase = self._on
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        times = self._times
        times.phase = None
        if times.synchronise:
            wait_for(self.device)
        times.seconds[self._on] += time.perf_counter() - self._start
        if self.device != CPU:
            times.known = False
