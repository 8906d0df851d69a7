"""A folder with pictures and one row for each, written as they are made: what is in it is finished.

A picture is put in its place whole, then its row is appended, and both are on the disk before the next one
starts. So whatever ends a run, at most the picture under way is lost; and what is there is believed only if
its content has the checksum that the row says.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..generate import write_whole
from .job import Drawing, Job, Way, Work

Key = tuple[int, int, str, float]  # number of the prompt, seed, way, ratio
Row = dict[str, Any]


class Store:
    def __init__(self, folder: Path, job: Job, resume: bool) -> None:
        self.folder, self.job = folder, job
        self.rows: dict[Key, Row] = {}
        self.damaged: list[str] = []
        about = folder / "job.json"
        if about.exists() and not resume:
            raise ValueError(
                f"{folder} has an evaluation in it: add --resume to go on, or take another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        wanted = json.loads(json.dumps(job.to_dict()))
        if about.exists():
            _compare(folder, json.loads(about.read_text()), wanted)
            self._take_over()
        write_whole(about, lambda path: path.write_text(json.dumps(wanted, indent=1)))

    def add(self, drawing: Drawing) -> None:
        """Keep a picture."""
        key = (drawing.number, drawing.seed, drawing.way, drawing.ratio)
        file = Path("images") / slug(drawing.label) / f"{drawing.number:05d}-{drawing.seed}.png"
        (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / file, lambda path: _write(path, drawing.png))
        row = {
            "number": drawing.number,
            "prompt": drawing.prompt,
            "seed": drawing.seed,
            "way": drawing.way,
            "ratio": drawing.ratio,
            "seconds": drawing.seconds,
            "file": str(file),
            "sha256": hashlib.sha256(drawing.png).hexdigest(),
        }
        append(self.folder / "rows.jsonl", row)
        self.rows[key] = row

    def missing(self, prompts: Sequence[str], seeds: Iterable[int]) -> list[Work]:
        """What is still to be drawn."""
        works = []
        for seed in seeds:
            for number, prompt in enumerate(prompts):
                ways = tuple(way for way in self.job.ways if not self._has(number, prompt, seed, way))
                if ways:
                    works.append(Work(number, prompt, seed, ways))
        return works

    def read(self, row: Row) -> bytes:
        return (self.folder / row["file"]).read_bytes()

    def _has(self, number: int, prompt: str, seed: int, way: Way) -> bool:
        row = self.rows.get((number, seed, *way))
        return row is not None and row["prompt"] == prompt

    def _take_over(self) -> None:
        """Believe the rows whose pictures are as they were written; the others will be drawn again."""
        for row in read_rows(self.folder / "rows.jsonl"):
            file = self.folder / row["file"]
            if file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == row["sha256"]:
                self.rows[row["number"], row["seed"], row["way"], row["ratio"]] = row
            else:
                self.damaged.append(row["file"])
        # one row for each picture that is there, and no half line at the end
        lines = "".join(json.dumps(row) + "\n" for row in self.rows.values())
        write_whole(self.folder / "rows.jsonl", lambda path: _write(path, lines.encode()))


def append(path: Path, row: Row) -> None:
    """Add a line, and come back when it is on the disk."""
    with path.open("ab") as file:
        file.write((json.dumps(row) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, without what a crash may have left half-written."""
    rows = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def slug(name: str) -> str:
    """A name for a folder: readable, and no two names share one."""
    readable = re.sub(r"[^A-Za-z0-9.=]+", "-", name).strip("-.")
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _compare(folder: Path, earlier: Row, wanted: Row) -> None:
    """More ways may be added later; everything else must be as it was."""
    changed = [key for key in wanted if key != "ways" and earlier.get(key) != wanted[key]]
    if changed:
        was = ", ".join(f"{key} was {earlier.get(key)!r}" for key in changed)
        raise ValueError(f"can't resume {folder}, which was drawn differently: {was}; take another folder")
