from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from pipelines import MAKERS, make

from tomadiff.quality.weights import WEIGHTS, fetch

torch.set_num_threads(1)  # tiny models: more threads only wait for each other


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", metavar="FOLDER", help="write pictures of the page for the docs")


@pytest.fixture(params=MAKERS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pipe(name: str) -> Iterator[DiffusionPipeline]:
    """A fresh pipeline of each kind."""
    yield make(name)


@pytest.fixture(scope="session")
def downloaded() -> Path:
    """The real weights, through the package's own fetch, kept for the next run of the tests."""
    folder = Path.home() / ".cache" / "tomadiff-tests"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOMADIFF_CACHE", str(folder))
        for name in WEIGHTS:
            fetch(name)
    return folder


@pytest.fixture
def real(downloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOMADIFF_CACHE", str(downloaded))
