"""Files: read with care, written whole, locked; and the cache folder."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
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
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

MAX_DEPTH = 64  # nesting levels of JSON; our own files have far fewer, so more is an attack
MOST = 1e100  # nothing that is measured is larger, and sums of larger numbers overflow


def cache() -> Path:
    """The cache folder: $TOMADIFF_CACHE, $XDG_CACHE_HOME/tomadiff or ~/.cache/tomadiff.

    Without a home directory, a temporary folder that is deleted when the process ends.
    """
    if folder := os.environ.get("TOMADIFF_CACHE"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "tomadiff"
    try:
        return Path.home() / ".cache" / "tomadiff"
    except RuntimeError:  # the user has no home directory, as in some containers
        return _folder_of_this_process()


@functools.cache
def _folder_of_this_process() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="tomadiff-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def parse_json(text: str | bytes) -> Any:
    """Like `json.loads`, but also raises ValueError if the content is nested too deeply to process safely."""
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


def printable(text: str) -> str:
    """Text of others, in which what would move a terminal's cursor or change its colours is spelled out."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def is_a(value: Any, kind: type) -> bool:
    """Whether a JSON value has this type; for `float`, it is finite, and integers count too."""
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST
    return type(value) is kind


def check_writable(path: Path) -> None:
    """Raise ValueError if a file can't be written; called before the work that it is for."""
    if path.is_dir():
        raise ValueError(f"can't write {path}: it is a folder; name a file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"can't write {path}: there is no folder {path.parent} that may be written to")


def check_folder(folder: Path) -> None:
    """Raise ValueError if a folder does not exist and can't be created, or is not writable."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(
            f"can't write to {folder}: {there} is no folder that may be written to; take another"
        )


def atomic_write(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file next to `path`, sync it to disk, then rename it to `path`."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"can't write {path}: there is no folder {path.parent}")
    partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}")
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # the umask still applies
    try:
        write(partial)
        _sync(partial)
        os.replace(partial, path)
        _sync(path.parent)  # the rename is a change of the folder
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def not_through_a_link(path: str, flags: int) -> int:
    """For `open(..., opener=...)`: in a folder of others, a link would lead what we write to another file."""
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)  # Windows has no such flag
    except OSError as error:
        if os.path.islink(path):
            raise ValueError(
                f"won't write to {path}: it is a link; delete it, or take another folder"
            ) from error
        raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, or raise an error that names the process holding it. The lock ends with the process.

    Folders that this creates are removed again if an error comes before anything is written to them.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+", opener=not_through_a_link) as file:
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
    """Wait until no other process is in this block for the same folder, if its file system supports locks."""
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
        return  # only POSIX systems can open a folder
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
