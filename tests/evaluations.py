"""A small evaluation with an embedded model, for the tests in process and on Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from comparison import mostly_alike
from torch import Tensor

from tomadiff.tools.evaluate.engines import local
from tomadiff.tools.evaluate.job import REFERENCE, Job
from tomadiff.tools.evaluate.pictures import read_picture
from tomadiff.tools.evaluate.store import FIELDS, Store, read_rows

CONTENDERS = (REFERENCE, ("tomadiff", 0.5), ("tomesd", 0.5))
JOB = Job("emoji-unet", CONTENDERS, steps=2, size=(32, 32), threads=1)
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
    """The rows of a folder, without what differs from run to run, or by rounding."""
    differs = ("seconds", "process", "sha256")
    rows = read_rows(folder / "rows.jsonl", FIELDS)
    rows = [{k: v for k, v in row.items() if k not in differs} for row in rows]
    return sorted(rows, key=lambda row: row["file"])


def pictures_of(folder: Path) -> Tensor:
    """[B, 3, H, W], in the order of the rows"""
    return torch.cat([read_picture(folder / row["file"]) for row in rows_of(folder)])


def same_pictures(a: Path, b: Path) -> bool:
    """Of the same rows; a colour that is rounded otherwise is the next of 255."""
    return rows_of(a) == rows_of(b) and mostly_alike(pictures_of(a), pictures_of(b), atol=2 / 255)


def lines_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The lines of a summary, by the name of the method."""
    return {line["method"]: line for line in json.loads((folder / "summary.json").read_text())["lines"]}
