"""What a benchmark keeps: every run, and all that its figures depend on."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tomadiff.runtime.files import write_whole
from tomadiff.tools.method_spec import DENSE, label

from . import figures
from .measure import Run


@dataclass
class Record:
    """All that was measured, as it is kept in a file."""

    about: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    counts: list[figures.Row] = field(default_factory=list)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # of each method at each ratio
    keep_steps: dict[str, float] = field(default_factory=dict)  # for which a method keeps its plans

    def rows(self) -> list[figures.Row]:
        return figures.rows(self.runs, self.counts, self.keep_steps)

    def add_work(self, size: tuple[int, int], flops: dict[tuple[str, float], int | None]) -> None:
        """The share of the denoiser's FLOPs in whole generations of one size."""
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
        write_whole(path, lambda partial: partial.write_text(json.dumps(content, indent=1)))

    def resume(self, path: Path) -> None:
        """Take over the runs of a file, if they were made in the same way."""
        try:
            earlier = json.loads(path.read_text())
            runs = [Run(**{**run, "size": tuple(run["size"])}) for run in earlier["runs"]]
            about = dict(earlier["about"])
            counts = [{**row, "size": tuple(row["size"])} for row in earlier["counts"]]
            settings, keep_steps = earlier.get("settings", {}), earlier["keep_steps"]
            if not all(run.seconds > 0 for run in runs):
                raise ValueError("a run of no time")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"can't resume {path}, which is no record of a benchmark: {error}") from error
        # through JSON and back, tuples are lists on both sides
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


def finished_rounds(
    runs: Sequence[Run], size: tuple[int, int], todo: Sequence[tuple[str, float]]
) -> set[int]:
    """Rounds in which every method had its turn; an error where the rounds are of others."""
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
    """One row a run, with everything it depends on."""
    with path.open("w", newline="") as file:
        columns = [column.name for column in fields(Run)]
        writer = csv.DictWriter(file, [*columns, "settings", *record.about])
        writer.writeheader()
        for run in record.runs:
            settings = json.dumps(record.settings.get(label(run.method, run.ratio), {}))
            size = f"{run.size[0]}x{run.size[1]}"
            writer.writerow({**asdict(run), "size": size, "settings": settings, **record.about})
