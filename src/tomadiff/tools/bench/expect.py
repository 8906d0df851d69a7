"""Count what each method does in a step, and predict its speed-up with a roofline model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tomadiff.models import Family, family_of
from tomadiff.tools.method_spec import DENSE, METHODS, merges, parse, parts_of
from tomadiff.tools.rivals import RIVALS

from .contenders import contender
from .count import Counts, count, patch_for_counting
from .figures import Row, markdown
from .models import skeleton
from .roofline import DEVICES, Device, predict
from .step import Step

Counted = dict[tuple[str, float], Counts]  # an average step, by method and ratio


def count_all(step: Step, size: tuple[int, int], todo: Sequence[tuple[str, float]]) -> Counted:
    """Count every method, averaged over the steps for which it reuses its plans."""
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
            patch = patch_for_counting(bones, family, entry.patch.asked, grid)
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
            "expected_speedup": predict(dense, counts, device).speedup if device else None,
        }
        for (method, ratio), counts in counted.items()
    ]


def table(counted: Counted, devices: Sequence[Device] = tuple(DEVICES.values())) -> str:
    """A Markdown table: the time of a dense call on each device, and the share that each method saves."""
    dense = counted[DENSE, 0.0]
    columns = {"GPU": [device.name for device in devices]}
    columns["dense, ms"] = [f"{1000 * predict(dense, dense, device).dense:.0f}" for device in devices]
    for (method, ratio), counts in counted.items():
        if method != DENSE:
            savings = [predict(dense, counts, device).saving for device in devices]
            columns[f"{method} at {ratio:g}"] = [f"{saving:+.0%}".replace("+", "") for saving in savings]
    return markdown(columns)


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
