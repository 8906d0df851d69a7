"""Files that are whole or not there, and the folder for what should not have to be made twice."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows, where nobody is kept out
    fcntl = None  # type: ignore[assignment]

MAX_DEPTH = 64  # levels of JSON: what is nested deeper is an attack, not a file of ours


def cache() -> Path:
    """$TOMADIFF_CACHE, else tomadiff in $XDG_CACHE_HOME, else in ~/.cache; without a home, only for now."""
    if folder := os.environ.get("TOMADIFF_CACHE"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "tomadiff"
    try:
        return Path.home() / ".cache" / "tomadiff"
    except RuntimeError:  # a user that the system doesn't know, as in containers
        return _folder_of_this_process()


@functools.cache
def _folder_of_this_process() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="tomadiff-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, with a ValueError also for what is nested too deep for whoever reads it next."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    level = [content]
    for _ in range(MAX_DEPTH):
        inner = [list(part.values()) if isinstance(part, dict) else part for part in level]
        level = [value for part in inner if isinstance(part, list) for value in part]
        if not level:
            return content
    raise ValueError("it is nested too deep")


def is_a(value: Any, kind: type) -> bool:
    """Whether a value from JSON is of a kind; where a float is asked for, a whole number will do."""
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is kind


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
    partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}")
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # less what the umask forbids
    try:
        write(partial)
        _sync(partial)
        os.replace(partial, path)
        _sync(path.parent)  # where the new name is written
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, or say who is in it. However a process ends, its lock goes.

    Folders that were made for it are gone again if an error comes before anything is in them.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read(200).strip() or "another process"
                raise ValueError(
                    f"{folder} is in use by {holder}: wait until it ends, or take another folder"
                ) from None
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
        file.flush()
        try:
            yield
        except BaseException:
            if made and [path.name for path in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
                for path in made:
                    path.rmdir()
            raise


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait for whoever else is in here with the same folder, if its file system can tell."""
    handle = None if fcntl is None else os.open(folder, os.O_RDONLY)
    try:
        if handle is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _sync(path: Path) -> None:
    if path.is_dir() and os.name != "posix":
        return  # only there can a folder be opened
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
