"""Files that are whole or not there, and the folder for what should not have to be made twice."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def cache() -> Path:
    """$TOMADIFF_CACHE, else tomadiff in $XDG_CACHE_HOME, else in ~/.cache."""
    if folder := os.environ.get("TOMADIFF_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tomadiff"


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, with a ValueError also for what is nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def check_writable(path: Path) -> None:
    """Complain about a file that can't be written before any work is done for it."""
    if path.is_dir():
        raise ValueError(f"can't write {path}: it is a folder; name a file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"can't write {path}: there is no folder {path.parent} that may be written to")


def check_folder(folder: Path) -> None:
    """Complain about a folder that is not there and can't be made."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(
            f"can't write to {folder}: {there} is no folder that may be written to; take another"
        )


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a file beside `path`, then put it in its place; all is on the disk after that."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"can't write {path}: there is no folder {path.parent}")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(Path(name))
        os.chmod(name, 0o644)
        _sync(Path(name))
        os.replace(name, path)
        _sync(path.parent)  # where the new name is written
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    if path.is_dir() and os.name != "posix":
        return  # only there can a folder be opened
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
