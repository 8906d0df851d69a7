"""Prompts to evaluate with: the paper's two sets, the embedded models' names, or any file."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tomadiff.runtime.files import parse_json
from tomadiff.tools.demo.pipelines import EmojiPipeline
from tomadiff.tools.demo.prompts import PROMPTS

IMAGENET = Path(__file__).with_name("imagenet.txt")  # the 1,000 class names, in the order of the classes
# The rows of MAPS-research/GEMRec-PromptBook without their 10 GB of pictures.
GEMREC = "MAPS-research/GEMRec-Metadata"
GEMREC_PROMPTS = 90  # each stands in 200 rows, one for each model
COLUMNS = ("prompt", "text", "caption")


def load_prompts(source: str, limit: int | None = None) -> list[str]:
    """Prompts of "imagenet", "gemrec" or "embedded", or of a .txt, .csv or .jsonl file, each once.

    limit: only so many; the first of a file, evenly spaced ones of our own lists, which are sorted by kind.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"a limit of {limit} prompts: there must be at least 1")
    if source in SOURCES:
        prompts = list(SOURCES[source]())
        count = min(limit or len(prompts), len(prompts))
        return [prompts[place * len(prompts) // count] for place in range(count)]
    path = Path(source)
    if path.suffix.lower() not in READERS:
        raise ValueError(
            f"no prompts called {source!r}: known are {', '.join(SOURCES)}; "
            f"anything else must be the path of a {', '.join(READERS)} file"
        )
    if not path.is_file():
        raise ValueError(f"no file {source} to read prompts from")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = list(file)
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error}") from error
    prompts = [prompt.strip() for prompt in READERS[path.suffix.lower()](lines, source)]
    prompts = list(dict.fromkeys(prompt for prompt in prompts if prompt))  # each prompt once
    if not prompts:
        raise ValueError(f"{source} has no prompts in it")
    return prompts[:limit]


def check_prompts(pipe: Any, prompts: Sequence[str]) -> None:
    """Raise for prompts that an embedded model doesn't know; other models take any text."""
    if isinstance(pipe, EmojiPipeline):
        pipe.text_encoder.tokenize(list(prompts))


def imagenet() -> Iterable[str]:
    """The paper's template, for each class."""
    names = IMAGENET.read_text(encoding="utf-8").splitlines()
    return [f"A photo of {article(name)} {name}." for name in names]


def article(name: str) -> str:
    """A or an, by the sound: an hourglass, a unicycle."""
    name = name.lower()
    vowel = name[0] in "aeiou" and not name.startswith(("eu", "uni", "one"))
    return "an" if vowel or name.startswith("hour") else "a"


def gemrec() -> Iterable[str]:
    """The prompts of GEMRec (Guo et al. 2024), in the order in which they first occur on the hub."""
    instead = "or pass a file of them: promptsets/promptset_v6.csv in github.com/MAPS-research/GEMRec"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"the GEMRec prompts need `datasets`: pip install datasets, {instead}") from error
    try:
        rows = load_dataset(GEMREC, split="train", streaming=True)
        prompts: dict[str, None] = {}
        for row in rows:
            prompts.setdefault(row["prompt"].strip())
            if len(prompts) == GEMREC_PROMPTS:
                break
    except Exception as error:  # the hub's client, its HTTP library and parquet each have some
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"can't get {GEMREC} from the hub ({reason}): go online, {instead}") from error
    return prompts


def read_text(lines: list[str], source: str) -> Iterable[str]:
    """One prompt a line; lines that begin with # are comments."""
    return [line for line in lines if not line.lstrip().startswith("#")]


def read_csv(lines: list[str], source: str) -> Iterable[str]:
    """The first line names the columns."""
    rows = csv.DictReader(lines, strict=True)
    try:
        named = {name.strip().lower(): name for name in rows.fieldnames or ()}
        if not named:
            return []
        column = next((named[name] for name in COLUMNS if name in named), None)
        if column is None and len(named) == 1:
            (column,) = named.values()
        if column is None:
            raise ValueError(
                f"{source} has no column {' or '.join(COLUMNS)}, only {', '.join(rows.fieldnames or ())}"
            )
        return [_cell(row, column, f"{source}, line {rows.line_num}") for row in rows]
    except csv.Error as error:
        raise ValueError(f"{source} is not a CSV file: after line {rows.line_num}: {error}") from error


def _cell(row: dict[Any, Any], column: str, where: str) -> str:
    if None in row:  # the key of values beyond the last column
        raise ValueError(f"{where} has more cells than there are columns: put text with commas in quotes")
    return row[column] or ""


def read_jsonl(lines: list[str], source: str) -> Iterable[str]:
    """A string a line, or an object with one among its keys."""
    return [_prompt_of(line, f"{source}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]


def _prompt_of(line: str, where: str) -> str:
    try:
        row: Any = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if isinstance(row, dict):
        row = next((row[name] for name in COLUMNS if name in row), None)
    if not isinstance(row, str):
        raise ValueError(f"{where} is neither a string nor has it one called {' or '.join(COLUMNS)}")
    return row


SOURCES: dict[str, Callable[[], Iterable[str]]] = {
    "imagenet": imagenet,
    "gemrec": gemrec,
    "embedded": lambda: PROMPTS,
}
READERS: dict[str, Callable[[list[str], str], Iterable[str]]] = {
    ".txt": read_text,
    ".csv": read_csv,
    ".jsonl": read_jsonl,
}
