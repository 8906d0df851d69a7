"""Count what each method does in a step, and predict what it saves with a roofline model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from diffusers import DiffusionPipeline

from tomadiff.models import Family, family_of
from tomadiff.runtime.prediction import prediction_type
from tomadiff.runtime.registration import denoiser
from tomadiff.runtime.sampling import sampling_of
from tomadiff.runtime.schedule import make_schedule
from tomadiff.tools.method_spec import (
    AUTO,
    DENSE,
    METHODS,
    configuration,
    label,
    merges,
    parse,
    parts_of,
    steps_of,
)
from tomadiff.tools.rivals import RIVALS

from .contenders import contender
from .count import Counts, count, patch_for_counting
from .figures import Row, markdown
from .models import skeleton
from .roofline import DEVICES, Device, seconds
from .step import Step

Counted = dict[tuple[str, float], Counts]  # an average step, by method and ratio


def count_all(step: Step, size: tuple[int, int], todo: Sequence[tuple[str, float]], kernels: bool) -> Counted:
    """Count every method, averaged over the steps for which it reuses its plans; with or without kernels."""
    bones, family = skeleton(step.model), family_of(step.model)
    call, grid = step.on(bones), _grid(step, family, size)
    found: Counted = {(DENSE, 0.0): count(call).per_step}
    for number, (method, ratio) in enumerate(todo):
        _tell(number, len(todo))
        if any(map(_caches, parts_of(method))) or not (ratio or merges(method)):
            continue  # without merging, calls that run are dense; what a cache does depends on tensor values
        entry = contender(bones, None, method, ratio)
        if entry.patch and entry.patch.config.auto:
            continue  # auto decides by measuring, which the meta device can't
        if entry.patch:
            patch = patch_for_counting(bones, family, entry.patch.asked, grid, kernels)
            found[method, ratio] = count(call, patch).per_step
        else:
            with entry.use():
                found[method, ratio] = count(call).per_step
    _tell(len(todo), len(todo))
    return found


def rows(counted: Counted, size: tuple[int, int], device: Device | None) -> list[Row]:
    """One row per method and ratio, with the speed-up that the roofline model predicts for a device."""
    dense = counted[DENSE, 0.0]
    return [
        {
            "size": size,
            "method": method,
            "ratio": ratio,
            "model_flops": counts.model.flops,
            "overhead_flops": counts.overhead.flops,
            # for methods that are not ours, overhead can't be separated from the model
            "overhead_flops_share": counts.overhead.flops / dense.total.flops
            if parse(method)[0] in METHODS
            else None,
            "bytes": counts.total.bytes,
            "launches": counts.total.launches,
            "launches_added": counts.total.launches - dense.total.launches if method != DENSE else None,
            "expected_speedup": seconds(dense, device) / seconds(counts, device) if device else None,
        }
        for (method, ratio), counts in counted.items()
    ]


class Generation(NamedTuple):
    """A whole generation: an average step of those that run, and how many run and are forecast."""

    step: Counts
    run: int
    forecast: int = 0

    def seconds(self, device: Device, compiled: bool) -> float:
        return self.run * seconds(self.step, device, compiled) + self.forecast * device.forecast_us * 1e-6


def generations(
    pipe: DiffusionPipeline, counted: Counted, todo: Sequence[tuple[str, float]], steps: int
) -> dict[str, Generation]:
    """A generation of this many steps by each method, by its label; dense comes first."""
    dense = counted[DENSE, 0.0]
    found = {DENSE: Generation(dense, steps)}
    for method, ratio in todo:
        if len(parts_of(method)) > 1:
            continue  # combinations are not counted
        name, step = parse(method)[0], counted.get((method, ratio))
        if name in METHODS or name == AUTO:
            config = configuration(method, ratio, family := family_of(denoiser(pipe)[0])).resolve(family)
            known = bool(family.output_sign) and prediction_type(pipe.scheduler) is not None
            schedule = make_schedule(
                config, steps, 0, sampling_of(pipe.scheduler), None, image_is_known=known
            )
            run = sum(map(schedule.runs, range(steps)))
            if len(config.ranges()) > 1 or (config.merges and schedule.merges and step is None):
                continue  # steps differ, or could not be counted
            found[label(method, ratio)] = Generation(step or dense, run, steps - run)
        elif steps_of(method) is not None or step is not None:
            found[label(method, ratio)] = Generation(step or dense, steps_of(method) or steps)
    return found


def table(
    generations: dict[str, Generation], compiled: bool, devices: Sequence[Device] = tuple(DEVICES.values())
) -> str:
    """A Markdown table: the time of a dense generation on each device, and what each method saves of it."""
    columns = {"GPU": [device.name for device in devices]}
    for name, generation in generations.items():
        cells = []
        for device in devices:
            guesses = [
                (generation.seconds(guess, compiled), generations[DENSE].seconds(guess, compiled))
                for guess in device.bounds()
            ]
            if name == DENSE:
                low, high = sorted(taken for taken, _ in guesses)
                cells.append(f"{float(f'{low:.2g}'):g} to {float(f'{high:.2g}'):g}")
            else:
                low, high = sorted(1 - taken / dense for taken, dense in guesses)
                cells.append(_range(round(100 * low), round(100 * high)))
        columns["dense, s" if name == DENSE else name] = cells
    return markdown(columns)


def _range(low: int, high: int) -> str:
    return f"{low}%" if low == high else f"{low} to {high}%"


def _grid(step: Step, family: Family, size: tuple[int, int]) -> tuple[int, ...]:
    """The grid of tokens. Position ids on the meta device have no values, so their number has to do."""
    names = [family.grid_from] if isinstance(family.grid_from, str) else family.grid_from
    sources = [step.argument(name) for name in names]
    if names[0].endswith("ids") and sources[0].is_meta:
        rows = round((len(sources[0]) * size[0] / size[1]) ** 0.5)
        return rows, len(sources[0]) // rows
    return family.grid(step.model, *sources)


def _caches(part: str) -> bool:
    name, _ = parse(part)
    return name in RIVALS and not RIVALS[name].per_step


def _tell(done: int, of: int) -> None:
    end = "\n" if done == of else "\r"
    print(f"counting FLOPs and launches: {done} of {of}", end=end, file=sys.stderr, flush=True)
