"""Which generation, which step, which call of the step: told by a model's arguments, without a device sync.

Nobody tells a model these things. But a pipeline's scheduler makes a new table of timesteps for each
generation, within one time only goes forward, and calls at the same time about the same image (guidance that
runs prompt and negative prompt apart) belong to one step, in a fixed order.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

# in one step; more at the same time are single-step generations. A pipeline draws wide pictures in many views
MAX_CALLS, MAX_VIEWS = 8, 256


class Clock:
    """`generation` counts up; `step` starts at 0 in each generation, `call` at 0 in each step."""

    def __init__(self, pipeline: Any = None, ascending: bool = False) -> None:
        self.pipeline = None if pipeline is None else weakref.ref(pipeline)
        self.scheduler: Any = getattr(pipeline, "scheduler", None)  # which other pipelines may share
        self._ascending = ascending  # the model's timesteps grow from noise to image
        self.generation = 0
        self.step = 0
        self.call = 0
        self._time: Time | None = None
        # the scheduler's timesteps and the last one seen: while they are held, others have other addresses
        self._table: Tensor | None = None
        self._last: Tensor | float | None = None
        self._sample: Any = None  # the last one seen, where times alone don't tell generations apart
        self._shapes: dict[int, Any] = {}  # of samples, by call of the step

    def tick(self, timestep: Tensor | float | None, sample: Any = None) -> None:
        """Take note of one call of the model, about noisy images; one that isn't told the time is a step."""
        self.scheduler = scheduler = getattr(self._pipeline(), "scheduler", self.scheduler)
        table = getattr(scheduler, "timesteps", None)
        before = self._time
        if timestep is None:
            now = Time("calls", before.value + 1 if before else 0.0)
        else:
            now = _read(timestep, scheduler, 1 if self._ascending else -1)
        # under autograd there is no denoising loop: every call is about other images
        anew = before is None or torch.is_grad_enabled()
        # (a time in a table of its own tells by itself: panoramas swap the scheduler's state in every call)
        anew |= table is not self._table and not now.in_table
        # and without any time, nobody knows which calls are about the same
        anew |= timestep is None and table is None
        self._table, self._last, self._time = table, timestep, now
        anew = anew or before is None or now.source != before.source or now.value < before.value
        if not anew and now == before:
            most = MAX_CALLS if table is None or not now.in_table else MAX_VIEWS
            anew = self.call + 1 == most or not _same_image(sample, self._sample)
        self._sample = sample if now.source == "value" else None
        call = self.call + 1 if now == before and not anew else 0
        shape = _shape(sample)
        anew = anew or self._shapes.get(call, shape) != shape
        if anew:
            self.generation, self.step, self.call = self.generation + 1, 0, 0
            self._shapes = {}
        else:
            self.step, self.call = self.step + (now != before), call
        self._shapes[self.call] = shape

    def forget(self) -> None:
        """Whatever comes next is a new generation."""
        self._time = self._table = self._last = self._sample = None
        self._shapes = {}

    def steps(self) -> int | None:
        """How many steps this generation has from here on, if there is a scheduler to tell."""
        if getattr(self.scheduler, "timesteps", None) is None:
            return None
        steps = len(self.scheduler.timesteps) - self._skipped()
        # A base model may leave the last ones to a refiner, and some tables end with a time of no step.
        # What a pipeline counted tells nothing else: it may be of a generation before, and another's now.
        counted = getattr(self._pipeline(), "num_timesteps", steps)
        ends = getattr(self._pipeline(), "denoising_end", None) is not None
        return min(steps, counted) if ends or counted == steps - 1 else steps

    def _skipped(self) -> int:
        """Steps before: image to image leaves some out, and another model may have done them."""
        scheduler, table = self.scheduler, self.scheduler.timesteps
        if self._time and self._time.source == table.untyped_storage().data_ptr():
            return (self._time.value - table.storage_offset()) // table.stride(0)
        index = getattr(scheduler, "step_index", None)
        if index is None or index >= len(table):  # before the first step, or behind the last
            index = getattr(scheduler, "begin_index", None)
        return index or 0

    def _pipeline(self) -> Any:
        return self.pipeline and self.pipeline()


class Time(NamedTuple):
    """A number that grows from step to step, and where it was read: times of two sources don't compare."""

    source: Any
    value: float

    @property
    def in_table(self) -> bool:
        """Whether it is the place of an entry in a table, which the source is."""
        return isinstance(self.source, int)


def _read(timestep: Tensor | float, scheduler: Any, forward: int) -> Time:
    if not isinstance(timestep, Tensor):
        return Time("value", forward * float(timestep))
    storage = timestep.untyped_storage()
    one_entry = timestep.numel() == 1 or not any(timestep.stride())
    if one_entry and storage.nbytes() > timestep.element_size():
        # a view of an entry of the scheduler's table: where it lies is the step
        return Time(storage.data_ptr(), timestep.storage_offset())
    if timestep.device.type != "cpu" and hasattr(scheduler, "step_index"):
        return Time("index", scheduler.step_index or 0)
    # waits for the device in one case only: a bare model there, and a timestep made anew for each call
    # (frames, or tokens, may have timesteps of their own, not all of which go forward at every step)
    if timestep.ndim > 1:
        return Time("value", forward * float(timestep.float().mean()))
    first, *others = timestep.flatten().tolist()
    # samples at times of their own come and go by themselves: nobody knows whose the next call's are
    source = "value" if all(other == first for other in others) else object()
    return Time(source, forward * first)


def _first(sample: Any) -> Any:
    """Some models take a list with a tensor for each image."""
    return sample[0] if isinstance(sample, (list, tuple)) and sample else sample


def _shape(sample: Any) -> Any:
    """Of one image: the batch gets smaller where guidance ends."""
    if isinstance(sample, Tensor):
        return sample.shape[1:]
    first = _first(sample)
    return first.shape if isinstance(first, Tensor) else None


def _same_image(sample: Any, last: Any) -> bool:
    """Guidance asks twice about one image; a generation that starts where the last one did, about another."""
    if isinstance(sample, (list, tuple)) and isinstance(last, (list, tuple)) and sample and last:
        sample, last = sample[0][None], last[0][None]
    if sample is last or not (isinstance(sample, Tensor) and isinstance(last, Tensor)):
        return True
    if sample.data_ptr() == last.data_ptr():
        return True
    # of batches, the first: some guidance asks about prompt and negative prompt together, then about one more
    return sample.shape[1:] == last.shape[1:] and torch.equal(sample[0], last[0].to(sample))
