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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tomadiff.runtime.files import check_folder, is_a, parse_json, write_whole
from tomadiff.tools.method_spec import decides

from .job import Drawing, Job, Work

Key = tuple[str, int, str, float]  # prompt, seed, way, ratio
Row = dict[str, Any]
COUNTED = 3  # pictures whose work is counted, where it differs from picture to picture
FIELDS: dict[str, type] = {
    "prompt": str,
    "seed": int,
    "way": str,
    "ratio": float,
    "seconds": float,
    "painter": str,
    "file": str,
    "sha256": str,
}


class Store:
    def __init__(self, folder: Path, job: Job, resume: bool) -> None:
        self.folder, self.job = folder, job
        self.rows: dict[Key, Row] = {}
        self.damaged: list[str] = []
        found = check_free(folder, resume)
        self._write_about(_joined(folder, job.to_dict()) if found else job.to_dict())
        self._take_over(found)

    def add(self, drawing: Drawing) -> None:
        """Keep a picture."""
        key = (drawing.prompt, drawing.seed, drawing.way, drawing.ratio)
        file = Path("images") / slug(drawing.label) / f"{slug(drawing.prompt)}-{drawing.seed}.png"
        (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / file, lambda path: path.write_bytes(drawing.png))
        row = {
            "prompt": drawing.prompt,
            "seed": drawing.seed,
            "way": drawing.way,
            "ratio": drawing.ratio,
            "seconds": drawing.seconds,
            "painter": drawing.painter,
            "file": str(file),
            "sha256": hashlib.sha256(drawing.png).hexdigest(),
        }
        if drawing.flops is not None:
            row["flops"] = drawing.flops
        append(self.folder / "rows.jsonl", row)
        self.rows[key] = row

    def missing(self, prompts: Sequence[str], seeds: Iterable[int]) -> list[Work]:
        """What is still to be drawn; there and back through the ways, so that nobody always goes first.

        The work is counted in the first pictures: in one, or in some where it differs between pictures.
        """
        works: list[Work] = []
        for number, (prompt, seed) in enumerate(_cases(prompts, seeds)):
            ways = tuple(way for way in self.job.ways if (prompt, seed, *way) not in self.rows)
            counted = tuple(way for way in ways if number < (COUNTED if decides(way[0]) else 1))
            if ways:
                works.append(Work(prompt, seed, ways[::-1] if len(works) % 2 else ways, counted))
        return works

    def asked(self, prompts: Sequence[str], seeds: Iterable[int]) -> list[Row]:
        """Rows of these prompts and seeds in the job's ways; there may be others, of earlier sessions."""
        keys = ((*case, *way) for case in _cases(prompts, seeds) for way in self.job.ways)
        return [self.rows[key] for key in keys if key in self.rows]

    def path(self, row: Row) -> Path:
        """Of its picture."""
        return self.folder / row["file"]

    def _write_about(self, about: Row) -> None:
        file, text = self.folder / "job.json", json.dumps(about, indent=1)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text() != text:
            write_whole(file, lambda path: path.write_text(text))

    def _take_over(self, found: Iterable[Row]) -> None:
        """Believe the rows whose pictures are as they were written; the others will be drawn again."""
        for row in found:
            if row["seconds"] > 0 and self._checksum(row["file"]) == row["sha256"]:
                self.rows[row["prompt"], row["seed"], row["way"], row["ratio"]] = row
            else:
                self.damaged.append(row["file"])
        # one row for each picture that is there, and no half line at the end
        lines = "".join(json.dumps(row) + "\n" for row in self.rows.values())
        write_whole(self.folder / "rows.jsonl", lambda path: path.write_text(lines))

    def _checksum(self, file: str) -> str | None:
        """Of a file in the folder; None for what can't be read, or is elsewhere."""
        try:
            path = (self.folder / file).resolve()
            if path.is_relative_to(self.folder.resolve()):
                return hashlib.sha256(path.read_bytes()).hexdigest()
        except (OSError, ValueError):  # a zero byte in the name
            pass
        return None


def check_free(folder: Path, resume: bool) -> list[Row]:
    """The rows that are there to resume."""
    check_folder(folder)
    found = read_rows(folder / "rows.jsonl", FIELDS)
    if found and not resume:
        raise ValueError(f"{folder} has an evaluation in it: add --resume to go on, or take another folder")
    return found


def _cases(prompts: Sequence[str], seeds: Iterable[int]) -> Iterator[tuple[str, int]]:
    return ((prompt, seed) for seed in seeds for prompt in prompts)


def case_of(row: Row) -> tuple[str, int]:
    """What pictures in different ways share."""
    return row["prompt"], row["seed"]


def append(path: Path, row: Row) -> None:
    """Add a line, and come back when it is on the disk."""
    with path.open("ab") as file:
        file.write((json.dumps(row) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path, fields: Mapping[str, type] = MappingProxyType({})) -> list[Row]:
    """The rows of a file that have these fields, without what a crash may have left half-written."""
    rows = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict) and all(is_a(row.get(name), kind) for name, kind in fields.items()):
            rows.append(row)
    return rows


def slug(name: str) -> str:
    """A name for a file: readable, not too long, and no two names share one."""
    readable = re.sub(r"[^A-Za-z0-9.=]+", "-", name)[:60].strip("-.")
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def folder_for(work: str, model: str) -> Path:
    """Where work on a model is kept if nobody says: models don't share a folder."""
    name = Path(model).resolve().name if Path(model).is_dir() else model
    return Path(work) / re.sub(r"[^\w.=]+", "-", name).strip("-.")


def _joined(folder: Path, wanted: Row) -> Row:
    """What job.json must say from now on: the ways of before and the new ones, of which none may differ."""
    try:
        earlier = dict(parse_json((folder / "job.json").read_text()))
        ways = dict(earlier.pop("ways", {}))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{folder} has pictures, but no readable job.json: take another folder") from error
    differs = _differences(earlier, {key: value for key, value in wanted.items() if key != "ways"})
    if not differs:
        both = {way: settings for way, settings in wanted["ways"].items() if way in ways}
        differs = _differences({way: ways[way] for way in both}, both)
    if differs:
        raise ValueError(
            f"can't resume {folder}, which was drawn differently: {'; '.join(differs)}; take another folder, "
            "or the settings and versions of before"
        )
    return wanted | {"ways": ways | wanted["ways"]}


def _differences(earlier: Any, now: Any, name: str = "") -> list[str]:
    """What is different, named by its path."""
    if isinstance(earlier, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*now, *earlier])
        pairs = ((f"{name}, {key}" if name else key, earlier.get(key), now.get(key)) for key in keys)
        return [line for path, a, b in pairs for line in _differences(a, b, path)]
    return [] if earlier == now else [f"{name} was {earlier!r}, is {now!r}"]
