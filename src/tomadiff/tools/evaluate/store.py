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

from tomadiff.runtime.files import (
    atomic_write,
    check_folder,
    is_a,
    not_through_a_link,
    parse_json,
    printable,
)
from tomadiff.tools.method_spec import decides

from .job import Drawing, Job, Work

Key = tuple[str, int, str, float]  # prompt, seed, contender, ratio
Row = dict[str, Any]
COUNTED = 3  # pictures whose FLOPs are counted, where they differ from picture to picture
FIELDS: dict[str, type] = {
    "prompt": str,
    "seed": int,
    "method": str,
    "ratio": float,
    "seconds": float,
    "process": str,
    "file": str,
    "sha256": str,
}
OPTIONAL: dict[str, type] = {"flops": float}


class Store:
    def __init__(self, folder: Path, job: Job, resume: bool) -> None:
        self.folder, self.job = folder, job
        self.rows: dict[Key, Row] = {}
        self.damaged: list[str] = []
        found = check_free(folder, resume)
        self._write_about(_joined(folder, job.to_dict()) if found else job.to_dict())
        self._take_over(found)

    def add(self, drawing: Drawing) -> None:
        """Save a picture and its row."""
        key = (drawing.prompt, drawing.seed, drawing.method, drawing.ratio)
        file = Path("images") / slug(drawing.label) / f"{slug(drawing.prompt)}-{drawing.seed}.png"
        if not self._inside(file):
            raise ValueError(f"won't write {file}: a link leads it out of {self.folder}; take another folder")
        (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self.folder / file, lambda path: path.write_bytes(drawing.png))
        row = {
            "prompt": drawing.prompt,
            "seed": drawing.seed,
            "method": drawing.method,
            "ratio": drawing.ratio,
            "seconds": drawing.seconds,
            "process": drawing.process,
            "file": str(file),
            "sha256": hashlib.sha256(drawing.png).hexdigest(),
        }
        if drawing.flops is not None:
            row["flops"] = drawing.flops
        append(self.folder / "rows.jsonl", row)
        self.rows[key] = row

    def missing(self, prompts: Sequence[str], seeds: Iterable[int]) -> list[Work]:
        """What is still to be drawn; every other case in reverse, so that no contender is always first.

        FLOPs are counted for the first picture, or for a few where they differ between pictures.
        """
        works: list[Work] = []
        for number, (prompt, seed) in enumerate(_cases(prompts, seeds)):
            contenders = tuple(
                contender for contender in self.job.contenders if (prompt, seed, *contender) not in self.rows
            )
            counted = tuple(
                contender for contender in contenders if number < (COUNTED if decides(contender[0]) else 1)
            )
            if contenders:
                works.append(Work(prompt, seed, contenders[::-1] if len(works) % 2 else contenders, counted))
        return works

    def asked(self, prompts: Sequence[str], seeds: Iterable[int]) -> list[Row]:
        """Rows of these prompts, seeds and contenders; earlier sessions may have left others."""
        keys = ((*case, *contender) for case in _cases(prompts, seeds) for contender in self.job.contenders)
        return [self.rows[key] for key in keys if key in self.rows]

    def path(self, row: Row) -> Path:
        """The path of a row's picture."""
        return self.folder / row["file"]

    def _write_about(self, about: Row) -> None:
        file, text = self.folder / "job.json", json.dumps(about, indent=1)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text() != text:
            atomic_write(file, lambda path: path.write_text(text))

    def _take_over(self, found: Iterable[Row]) -> None:
        """Keep the rows whose pictures have their checksums; the others will be drawn again."""
        for full in found:
            # anything else, such as a metric, would be taken for measured
            row = {name: full[name] for name in (*FIELDS, *OPTIONAL) if name in full}
            if row["seconds"] > 0 and self._checksum(row["file"]) == row["sha256"]:
                self.rows[row["prompt"], row["seed"], row["method"], row["ratio"]] = row
            else:
                self.damaged.append(row["file"])
        # one row for each picture that is there, and no half line at the end
        lines = "".join(json.dumps(row) + "\n" for row in self.rows.values())
        atomic_write(self.folder / "rows.jsonl", lambda path: path.write_text(lines))

    def _checksum(self, file: str) -> str | None:
        """The checksum of a file in the folder; None if it can't be read, or is outside."""
        try:
            if file.isprintable() and self._inside(file):  # names are shown on the terminal
                return hashlib.sha256((self.folder / file).read_bytes()).hexdigest()
        except (OSError, ValueError):  # a zero byte in the name
            pass
        return None

    def _inside(self, file: str | Path) -> bool:
        """Whether a path in the folder stays there, wherever links lead."""
        return (self.folder / file).resolve().is_relative_to(self.folder.resolve())


def check_free(folder: Path, resume: bool) -> list[Row]:
    """The rows of an earlier session; raises if there are some and nobody asked to resume."""
    check_folder(folder)
    found = read_rows(folder / "rows.jsonl", FIELDS, OPTIONAL)
    if found and not resume:
        raise ValueError(
            f"{folder} has an evaluation in it: add --resume to continue it, or choose another folder"
        )
    return found


def _cases(prompts: Sequence[str], seeds: Iterable[int]) -> Iterator[tuple[str, int]]:
    return ((prompt, seed) for seed in seeds for prompt in prompts)


def case_of(row: Row) -> tuple[str, int]:
    """The prompt and seed that pictures of different contenders share."""
    return row["prompt"], row["seed"]


def append(path: Path, row: Row) -> None:
    """Append a line, and wait until it is on the disk."""
    with open(path, "ab", opener=not_through_a_link) as file:
        file.write((json.dumps(row) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def read_rows(
    path: Path,
    fields: Mapping[str, type] = MappingProxyType({}),
    optional: Mapping[str, type] = MappingProxyType({}),
) -> list[Row]:
    """The rows of a file that have these fields, without what a crash may have left half-written."""
    rows = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if not isinstance(row, dict):
            continue
        known = {**fields, **{name: kind for name, kind in optional.items() if name in row}}
        if all(is_a(row.get(name), kind) for name, kind in known.items()):
            rows.append(row)
    return rows


def slug(name: str) -> str:
    """A name for a file: readable, not too long, and no two names share one."""
    readable = re.sub(r"[^A-Za-z0-9.=]+", "-", name)[:60].strip("-.")
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def folder_for(work: str, model: str) -> Path:
    """The default folder for work on a model; each model has its own."""
    name = Path(model).resolve().name if Path(model).is_dir() else model
    return Path(work) / re.sub(r"[^\w.=]+", "-", name).strip("-.")


def _joined(folder: Path, wanted: Row) -> Row:
    """The content of job.json after resuming: earlier contenders and new ones; settings may not change."""
    try:
        earlier = dict(parse_json((folder / "job.json").read_text()))
        contenders = dict(earlier.pop("contenders", {}))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{folder} has pictures, but no readable job.json: take another folder") from error
    differs = _differences(earlier, {key: value for key, value in wanted.items() if key != "contenders"})
    if not differs:
        both = {
            contender: settings
            for contender, settings in wanted["contenders"].items()
            if contender in contenders
        }
        differs = _differences({contender: contenders[contender] for contender in both}, both)
    if differs:
        raise ValueError(
            f"can't resume {folder}, which was drawn differently: {'; '.join(differs)}; take another folder, "
            "or the settings and versions of before"
        )
    return wanted | {"contenders": contenders | wanted["contenders"]}


def _differences(earlier: Any, now: Any, name: str = "") -> list[str]:
    """The paths of all values that differ."""
    if isinstance(earlier, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*now, *earlier])
        names = {key: f"{name}, {printable(key)}" if name else printable(key) for key in keys}
        pairs = ((names[key], earlier.get(key), now.get(key)) for key in keys)
        return [line for path, a, b in pairs for line in _differences(a, b, path)]
    return [] if earlier == now else [f"{name} was {earlier!r}, is {now!r}"]
