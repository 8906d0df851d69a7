"""The record of a benchmark: every run, and everything that its figures depend on."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tomadiff.runtime.files import atomic_write, is_a, parse_json
from tomadiff.tools.method_spec import DENSE, label

from . import figures
from .measure import PARTS, Run


@dataclass
class Record:
    """Everything that was measured, in the form in which it is saved to a file."""

    about: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    counts: list[figures.Row] = field(default_factory=list)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # by label: a method at a ratio
    keep_steps: dict[str, float] = field(default_factory=dict)  # for how many steps each method reuses a plan

    def rows(self) -> list[figures.Row]:
        return figures.rows(self.runs, self.counts, self.keep_steps)

    def add_work(self, size: tuple[int, int], flops: dict[tuple[str, float], int | None]) -> None:
        """Record each method's FLOPs in whole generations of one size, as a share of the dense FLOPs."""
        dense = flops.get((DENSE, 0.0))
        for (method, ratio), mine in flops.items():
            if dense and mine is not None:
                key = {"size": size, "method": method, "ratio": ratio}
                row = next((row for row in self.counts if key.items() <= row.items()), None)
                if row is None:
                    self.counts.append(row := key)
                row["work"] = mine / dense

    def save(self, path: Path) -> None:
        content = {**asdict(self), "rows": self.rows()}
        atomic_write(path, lambda partial: partial.write_text(json.dumps(content, indent=1)))

    def resume(self, path: Path) -> None:
        """Load the runs of a file, if they were made with the same settings."""
        try:
            earlier = parse_json(path.read_text())
            runs = _whole_rounds([_run(row) for row in earlier["runs"]])
            about = dict(earlier["about"])
            counts = [_counted(row) for row in earlier["counts"]]
            settings, keep_steps = dict(earlier.get("settings", {})), _numbers(earlier["keep_steps"])
            if not all(steps > 0 for steps in keep_steps.values()):
                raise ValueError("plans that are kept for no step")
            figures.rows(runs, counts, keep_steps)  # raises for methods that can't be parsed
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"can't resume {path}, which is no record of a benchmark: {error}") from error
        # through JSON and back, so that tuples become lists on both sides
        changed = [
            key for key, value in json.loads(json.dumps(self.about)).items() if about.get(key) != value
        ]
        if changed:
            was = ", ".join(f"{key} was {about.get(key)!r}" for key in changed)
            raise ValueError(
                f"can't resume {path}, which was measured differently: {was}; take another --json"
            )
        self.runs, self.counts = runs, counts
        self.settings, self.keep_steps = settings, keep_steps


def _run(row: dict[str, Any]) -> Run:
    """Read a run from a file's row, with checks."""
    run = Run(**{**row, "size": _size(row["size"])})
    kinds: dict[str, type] = {"method": str, "ratio": float, "round": int, "seconds": float}
    kinds |= {"peak_bytes": int, "level_bytes": int}
    parts = [f"{part}_seconds" for part in PARTS]
    kinds |= {name: float for name in parts if getattr(run, name) is not None}
    wrong = [name for name, kind in kinds.items() if not is_a(getattr(run, name), kind)]
    if wrong or run.seconds <= 0:
        raise ValueError(f"a run has no {' or '.join(wrong or ['seconds'])}")
    return run


def _whole_rounds(runs: Sequence[Run]) -> list[Run]:
    """The runs of complete rounds, in which every method had its turn."""
    turns: dict[tuple[int, int], dict[int, set[tuple[str, float]]]] = {}
    for run in runs:
        turns.setdefault(run.size, {}).setdefault(run.round, set()).add((run.method, run.ratio))
    everybody = {size: set().union(*by_round.values()) for size, by_round in turns.items()}
    return [run for run in runs if turns[run.size][run.round] == everybody[run.size]]


def _counted(row: dict[str, Any]) -> figures.Row:
    """Read a method's counts from a file's row, with checks."""
    if not is_a(row["method"], str) or not is_a(row["ratio"], float):
        raise ValueError("a count is of no method and ratio")
    counts = {name: value for name, value in row.items() if name not in ("size", "method")}
    _numbers({name: value for name, value in counts.items() if value is not None})
    return {"size": _size(row["size"]), "method": row["method"], **counts}


def _size(value: Any) -> tuple[int, int]:
    height, width = value
    if not is_a(height, int) or not is_a(width, int):
        raise ValueError(f"{value!r} is no size")
    return height, width


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if not is_a(value, float):
            raise ValueError(f"{name} is {value!r}, which is no number")
    return values


def finished_rounds(
    runs: Sequence[Run], size: tuple[int, int], todo: Sequence[tuple[str, float]]
) -> set[int]:
    """Numbers of the rounds in which every method had its turn; raises if the runs are of other methods."""
    there = {(run.round, run.method, run.ratio) for run in runs if run.size == size}
    measured = {(method, ratio) for _, method, ratio in there}
    if measured and measured != set(todo):
        names = ", ".join(sorted(label(*pair) for pair in measured))
        raise ValueError(
            f"at {size[0]} x {size[1]} the file has rounds of {names}: rounds with others can't be added to "
            "them; take another --json"
        )
    return {
        number
        for number in {run.round for run in runs}
        if all((number, method, ratio) in there for method, ratio in todo)
    }


def write_csv(record: Record, path: Path) -> None:
    """Write one row per run, with everything it depends on."""
    with path.open("w", newline="") as file:
        columns = [column.name for column in fields(Run)]
        writer = csv.DictWriter(file, [*columns, "settings", *record.about])
        writer.writeheader()
        for run in record.runs:
            settings = json.dumps(record.settings.get(label(run.method, run.ratio), {}))
            size = f"{run.size[0]}x{run.size[1]}"
            writer.writerow({**asdict(run), "size": size, "settings": settings, **record.about})
