"""Which steps of a generation should run, computed from the outputs at all steps of a few dense pictures.

A step that doesn't run gets a forecast, a weighted sum of the clean images that earlier outputs stand for.
So the errors of all forecasts follow from the dot products of these images, a small matrix, and the steps
with the smallest errors from dynamic programming. That adds up errors as if all of them hurt. Errors may also
cancel out in the latents: so the usual steps are moved, one at a time, as long as less of their sum is left.
Which of the two is closer depends on the model, and only pictures tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tomadiff.runtime.autotune import copied
from tomadiff.runtime.forecast import Point, extrapolation
from tomadiff.runtime.hook import parameter_names
from tomadiff.runtime.prediction import NoisyInput, prediction_of
from tomadiff.runtime.sampling import sampling_of
from tomadiff.runtime.schedule import FROM_NOISE, Schedule

FARTHEST = 12  # most steps from one that runs to the next; longer gaps are too risky, and slow to search
SHARES = (0.5, 0.42, 1 / 3, 0.25)  # shares of steps that run, for each of which a list is computed
MAX_STEPS = 64  # the search takes seconds up to here, and grows with the fourth power
INTERVALS = (2, 3, 4)  # the search also starts from the steps of these intervals
Dots = np.ndarray  # [steps, steps]: dot products of images, in fp64, since errors are small differences
Path = tuple[float, list[int]]  # the error of the forecasts, and the steps that run


def placements(
    model: nn.Module, pipeline: Any, draws: Sequence[Callable[[], Any]], sign: int = 1
) -> list[list[int]]:
    """Lists of steps to run, for a few shares of them; each of `draws` draws a dense picture.

    None where fresh noise is added, or where nobody can tell which call is of which step. `sign` is as in
    `prediction_of`.
    """
    sampling = sampling_of(pipeline.scheduler)
    if not sampling.deterministic or sampling.between_steps:
        return []
    recorded = [record(model, pipeline, draw, sign) for draw in draws]
    if any(dots is None for dots in recorded):
        return []
    dots = np.sum(recorded, axis=0)
    steps, sizes = len(dots), step_sizes(pipeline.scheduler, sign)
    if steps > MAX_STEPS:
        return []
    found = place(dots, sizes, [round(share * steps) for share in SHARES])
    for interval in INTERVALS:
        schedule = Schedule(steps, interval, warm_up=FROM_NOISE)
        usual = [step for step in range(steps) if schedule.runs(step)]
        if 3 < len(usual) < steps:
            found.append(exchange(dots, sizes, usual))
    return [list(each) for each in dict.fromkeys(map(tuple, found))]


def record(model: nn.Module, pipeline: Any, draw: Callable[[], Any], sign: int = 1) -> Dots | None:
    """The dot products of what is forecast in a picture; None where calls don't divide evenly into steps."""
    first, calls = parameter_names(model)[0], []

    def keep(_model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        # copied, since the caller may modify them in place
        calls.append(copied((args[0] if args else kwargs[first], output)))

    handle = model.register_forward_hook(keep, with_kwargs=True)
    try:
        draw()
    finally:
        handle.remove()
    steps = len(pipeline.scheduler.timesteps)
    if not calls or len(calls) % steps:
        return None
    prediction, images = prediction_of(pipeline, pipeline.scheduler, sign), []
    for number, (sample, output) in enumerate(calls):
        terms = prediction.at(number * steps // len(calls)) if prediction else None
        point = Point.of(0, output, NoisyInput(sample, terms))
        images.append(torch.cat([image.flatten().cpu() for image in point.images.values()]))
    if len({len(image) for image in images}) > 1:
        return None
    return dot_products(torch.stack(images).view(steps, -1))


def dot_products(images: Tensor) -> Dots:
    """images: [steps, elements]."""
    exact = images.double()
    return (exact @ exact.mT).numpy()


def step_sizes(scheduler: Any, sign: int = 1) -> list[float]:
    """How far an error of what is forecast moves the latents; 1 if that is unknown."""
    steps, sigmas = len(scheduler.timesteps), getattr(scheduler, "sigmas", None)
    if sigmas is None or len(sigmas) != steps + 1:
        return [1.0] * steps
    changes, prediction = sigmas.diff().abs().cpu(), prediction_of(None, scheduler, sign)
    return (changes if prediction is None else changes * prediction.of_image.abs().cpu()).tolist()


def place(dots: Dots, sizes: Sequence[float], counts: Iterable[int]) -> list[list[int]]:
    """For each count, the steps to run: the first two, the last, and those between with the least error."""
    last, wanted, found = len(dots) - 1, {count for count in counts if 3 < count <= len(dots)}, []
    gaps: dict[tuple[int, ...], list[float]] = {}
    # the best way to each of the last three steps that run, which is all that a forecast is made of
    best: dict[tuple[int, ...], Path] = {(0, 1): (0.0, [0, 1])}
    for count in range(3, max(wanted, default=0) + 1):
        longer: dict[tuple[int, ...], Path] = {}
        for ran, (error, path) in best.items():
            if ran not in gaps:
                gaps[ran] = gap_errors(dots, sizes, ran)
            for step, more in enumerate(gaps[ran], ran[-1] + 1):
                state = (*ran, step)[-3:]
                if state not in longer or error + more < longer[state][0]:
                    longer[state] = error + more, [*path, step]
        best = longer
        ends = [path for ran, path in best.items() if ran[-1] == last]
        if count in wanted and ends:
            found.append(min(ends)[1])
    return found


def gap_errors(dots: Dots, sizes: Sequence[float], ran: Sequence[int]) -> list[float]:
    """The errors of forecasts from the steps in `ran` until another one runs, for each that could be next."""
    if ran[-1] == len(dots) - 1:
        return []
    errors = [0.0]
    for step in range(ran[-1] + 1, min(ran[-1] + FARTHEST, len(dots) - 1)):
        weights = np.array([1.0, *(-weight for weight in extrapolation(list(ran), step, len(dots)))])
        places = [step, *ran]
        square = weights @ dots[np.ix_(places, places)] @ weights
        errors.append(errors[-1] + sizes[step] * max(float(square), 0.0) ** 0.5)
    return errors


def exchange(dots: Dots, sizes: Sequence[float], steps: list[int]) -> list[int]:
    """Move single steps, but the first two and the last, as long as errors cancel out better."""
    least = drift(dots, sizes, steps)
    while True:
        idle = [step for step in range(2, len(dots) - 1) if step not in steps]
        moves = [sorted({*steps, new} - {old}) for old in steps[2:-1] for new in idle]
        error, best = min(((drift(dots, sizes, move), move) for move in moves), default=(least, steps))
        if error >= least:
            return steps
        least, steps = error, best


def drift(dots: Dots, sizes: Sequence[float], steps: Sequence[int]) -> float:
    """How far all forecasts together move the latents."""
    moved = np.zeros(len(dots))  # the weight of each step's output in that move
    for step in sorted(set(range(len(dots))) - set(steps)):
        ran = [each for each in steps if each < step][-3:]
        moved[step] += sizes[step]
        moved[ran] -= sizes[step] * np.array(extrapolation(ran, step, len(dots)))
    return max(float(moved @ dots @ moved), 0.0) ** 0.5
