"""Infer generation, step and call of the step from a model's arguments, without a device sync.

A pipeline doesn't pass these to its model. But its scheduler creates a new tensor of timesteps for each
generation; within a generation, time only moves forward; and calls with the same timestep and the same image
(guidance that runs prompt and negative prompt separately) belong to one step, in a fixed order.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The most calls with one timestep that count as one step; more are generations of a single step each. With
# a scheduler's timesteps the limit is higher, since panorama pipelines run many views of an image per step.
MAX_CALLS, MAX_VIEWS = 8, 256


class Clock:
    """`generation` counts up; `step` starts at 0 in each generation, `call` at 0 in each step."""

    def __init__(self, pipeline: Any = None, ascending: bool = False) -> None:
        self.pipeline = None if pipeline is None else weakref.ref(pipeline)
        self.scheduler: Any = getattr(pipeline, "scheduler", None)  # other pipelines may share it
        self._ascending = ascending  # the model's timesteps grow from noise to image
        self.generation = 0
        self.step = 0
        self.call = 0
        self._time: Time | None = None
        # the scheduler's table and the last timestep, kept alive so that no other tensor gets their address
        self._table: Tensor | None = None
        self._last: Tensor | float | None = None
        self._sample: Any = None  # the last sample, if timesteps alone can't tell generations apart
        self._shapes: dict[int, Any] = {}  # shapes of samples, by call of the step

    def tick(self, timestep: Tensor | float | None, sample: Any = None) -> None:
        """Register one call of the model; `sample` is its noisy image. Without a timestep, each is a step."""
        self.scheduler = scheduler = getattr(self.current_pipeline(), "scheduler", self.scheduler)
        table = getattr(scheduler, "timesteps", None)
        before = self._time
        if timestep is None:
            now = Time("calls", before.value + 1 if before else 0.0)
        else:
            now = _read(timestep, scheduler, 1 if self._ascending else -1)
        # under autograd there is no denoising loop: every call is about other images
        anew = before is None or torch.is_grad_enabled()
        # a new table means a new generation, unless the timestep is a view of one: the address of that table
        # is compared below (panorama pipelines swap the scheduler's state in every call)
        anew |= table is not self._table and not now.in_table
        # with neither timestep nor scheduler, nothing shows which calls belong together
        anew |= timestep is None and table is None
        self._table, self._last, self._time = table, timestep, now
        anew = anew or before is None or now.source != before.source or now.value < before.value
        if not anew and now == before:
            most = MAX_CALLS if table is None or not now.in_table else MAX_VIEWS
            anew = self.call + 1 == most or not _same_image(sample, self._sample)
        # views of a panorama have one timestep, which a pipeline takes from its table, and different images
        self._sample = sample if now.source == "value" or (now.in_table and self.pipeline is None) else None
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
        """Start a new generation with the next call."""
        self._time = self._table = self._last = self._sample = None
        self._shapes = {}

    def steps(self) -> int | None:
        """The number of steps that this generation has from here on; None without a scheduler."""
        if getattr(self.scheduler, "timesteps", None) is None:
            return None
        steps = len(self.scheduler.timesteps) - self.skipped()
        # A base model may leave the last steps to a refiner (`denoising_end`), and some tables have a final
        # timestep that is not a step. In other cases `num_timesteps` is not reliable: it may still be the
        # number from an earlier generation.
        counted = getattr(self.current_pipeline(), "num_timesteps", steps)
        ends = getattr(self.current_pipeline(), "denoising_end", None) is not None
        return min(steps, counted) if ends or counted == steps - 1 else steps

    def skipped(self) -> int:
        """Earlier entries of the table: steps that image-to-image skips, or that another model has done."""
        scheduler, table = self.scheduler, self.scheduler.timesteps
        if self._time and self._time.source == table.untyped_storage().data_ptr():
            return (self._time.value - table.storage_offset()) // table.stride(0)
        index = getattr(scheduler, "step_index", None)
        if index is None or index >= len(table):  # before the first step, or after the last
            index = getattr(scheduler, "begin_index", None)
        return index or 0

    def current_pipeline(self) -> Any:
        """The pipeline that was given; None for a bare model, or once the pipeline is gone."""
        return self.pipeline and self.pipeline()


class Time(NamedTuple):
    """A number that grows from step to step, and where it was read from."""

    source: Any  # times from different sources can't be compared
    value: float
    step_index: int = 0  # of a scheduler that has every timestep twice (Heun), to tell its steps apart

    @property
    def in_table(self) -> bool:
        """Whether the timestep is a view of an entry in a table; the source is then the table's address."""
        return isinstance(self.source, int)


def _read(timestep: Tensor | float, scheduler: Any, forward: int) -> Time:
    if not isinstance(timestep, Tensor):
        return Time("value", forward * float(timestep))
    storage = timestep.untyped_storage()
    one_entry = timestep.numel() == 1 or not any(timestep.stride())
    if one_entry and storage.nbytes() > timestep.element_size():
        # a view of an entry in the scheduler's table: its offset identifies the step
        return Time(storage.data_ptr(), timestep.storage_offset())
    if timestep.device.type != "cpu" and hasattr(scheduler, "step_index"):
        return Time("index", scheduler.step_index or 0)
    # Reading the value synchronises only for a model without a scheduler whose timestep is a new tensor on
    # the device.
    if timestep.ndim > 1:
        # a timestep per frame or token, not all of which advance in every step
        return Time("value", forward * float(timestep.float().mean()))
    first, *others = timestep.flatten().tolist()
    # samples with different timesteps belong to different generations, so the next call can't continue this
    source = "value" if all(other == first for other in others) else object()
    # Other schedulers never repeat a timestep. Where one is repeated, another pipeline on the model began.
    repeats = getattr(scheduler, "order", 1) > 1
    return Time(source, forward * first, getattr(scheduler, "step_index", None) or 0 if repeats else 0)


def _first(sample: Any) -> Any:
    """The first image's tensor: some models take a list of tensors, one per image."""
    return sample[0] if isinstance(sample, (list, tuple)) and sample else sample


def _shape(sample: Any) -> Any:
    """The shape of one image, without the batch, which shrinks when guidance ends."""
    if isinstance(sample, Tensor):
        return sample.shape[1:]
    first = _first(sample)
    return first.shape if isinstance(first, Tensor) else None


def _same_image(sample: Any, last: Any) -> bool:
    """Whether two calls with the same timestep are about the same image.

    They are if guidance calls the model twice; they are not if a new generation starts at that timestep.
    """
    if isinstance(sample, (list, tuple)) and isinstance(last, (list, tuple)):
        return all(map(_same_image, sample, last))
    if sample is last or not (isinstance(sample, Tensor) and isinstance(last, Tensor)):
        return True
    if sample.data_ptr() == last.data_ptr():
        return True
    if sample.shape[1:] != last.shape[1:]:
        return False
    # some guidance calls the model with a batch of two prompts, then with one more
    count = len(sample) if len(sample) == len(last) else 1
    return torch.equal(sample[:count], last[:count].to(sample))
