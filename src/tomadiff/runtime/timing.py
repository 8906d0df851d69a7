"""Where a model's time goes: into plans, merging, unmerging, and all of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from .machine import wait_for


class Times:
    """Books what is done, while it is done."""

    def __init__(self) -> None:
        self.seconds = {"plan": 0.0, "merge": 0.0, "unmerge": 0.0, "model": 0.0}
        self.phase: str | None = None  # which of these is under way; None for the model itself
        self.synchronise = False  # wait for the device around each of these: slow, but then times are known
        self.known = True  # False once it ran on a device whose clock is not ours
        self._start = 0.0

    def start_call(self) -> None:
        self._start = time.perf_counter()

    def end_call(self) -> None:
        self.seconds["model"] += time.perf_counter() - self._start

    @contextlib.contextmanager
    def spent(self, on: str, device: torch.device) -> Iterator[None]:
        """Book the time of what is inside. Only the CPU works while we look; others run behind our back."""
        if self.synchronise:
            wait_for(device)
        start, self.phase = time.perf_counter(), on
        try:
            yield
        finally:
            self.phase = None
        if self.synchronise:
            wait_for(device)
        self.seconds[on] += time.perf_counter() - start
        self.known &= device.type == "cpu"

    @contextlib.contextmanager
    def overhead(self, on: str, device: torch.device) -> Iterator[None]:
        """Our own work: booked, and in the precision that we ask for, also under autocast."""
        with self.spent(on, device), torch.autocast(device.type, enabled=False):
            yield
