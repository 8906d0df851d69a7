"""Which sessions are still connected."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

GRACE = 5.0  # seconds between a request and its stream of answers, or between two streams


class Listeners:
    """Sessions with an open stream of answers, or that had one or sent a request within GRACE."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._seen: dict[str, float] = {}  # replaced, never changed in place: other threads read it

    def saw(self, session: str) -> None:
        now = time.monotonic()
        recent = {name: when for name, when in self._seen.items() if now - when < GRACE}
        self._seen = {**recent, session: now}

    @contextmanager
    def listening(self, session: str) -> Iterator[None]:
        """A session counts as connected for the length of the `with` block."""
        self._open[session] += 1
        try:
            yield
        finally:
            self._open[session] -= 1
            if not self._open[session]:
                del self._open[session]
            self.saw(session)

    def there(self, session: str) -> bool:
        seen = self._seen.get(session)
        return session in self._open or (seen is not None and time.monotonic() - seen < GRACE)
