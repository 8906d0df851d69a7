"""Which examples a fuzzer tries: `make test` the same few every time, `make fuzz` many new ones."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, seed, settings


def fuzz(name: str, share: int) -> Callable[[Any], Any]:
    """Examples of a test that is slow or has many cases: one in `share`; others for each name."""
    few = settings(max_examples=settings().max_examples // share, suppress_health_check=list(HealthCheck))
    number = zlib.crc32(name.encode()) if settings().derandomize else random.SystemRandom().getrandbits(32)
    return lambda test: seed(number)(few(test))
