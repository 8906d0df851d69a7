from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from diffusers import DiffusionPipeline
from pipelines import MAKERS, make

torch.set_num_threads(1)  # tiny models: more threads only wait for each other


@pytest.fixture(params=MAKERS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pipe(name: str) -> Iterator[DiffusionPipeline]:
    """A fresh pipeline of each kind."""
    yield make(name)
