"""A small evaluation with an embedded model, for the tests in process and on Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tomadiff.tools.evaluate.engines import local
from tomadiff.tools.evaluate.job import REFERENCE, Job
from tomadiff.tools.evaluate.store import FIELDS, Store, read_rows

WAYS = (REFERENCE, ("tomadiff", 0.5), ("tomesd", 0.5))
JOB = Job("emoji-unet", WAYS, steps=2, size=(32, 32), threads=1)
PROMPTS = ["pizza", "hot dog"]
SMALL = [
    "--model",
    "emoji-unet",
    "--prompts",
    "embedded",
    "--steps",
    "2",
    "--size",
    "32",
    "32",
    "--threads",
    "1",
]


def fill(store: Store, prompts: list[str] = PROMPTS, seeds: tuple[int, ...] = (0, 1)) -> None:
    for made in local.run(store.job, store.missing(prompts, seeds)):
        store.add(made)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a folder, without what differs from run to run."""
    differs = ("seconds", "painter")
    rows = [
        {k: v for k, v in row.items() if k not in differs} for row in read_rows(folder / "rows.jsonl", FIELDS)
    ]
    return sorted(rows, key=lambda row: row["file"])


def lines_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The lines of a summary, by the name of the way."""
    return {line["way"]: line for line in json.loads((folder / "summary.json").read_text())["lines"]}
