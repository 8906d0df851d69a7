"""Who is still there to see what they asked for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

GRACE = 5.0  # seconds from asking to listening, and from one connection to the next


class Listeners:
    """Sessions with a connection open on which answers come, or that had one or asked just now."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._seen: dict[str, float] = {}  # never changed in place: other threads read it

    def saw(self, session: str) -> None:
        now = time.monotonic()
        recent = {name: when for name, when in self._seen.items() if now - when < GRACE}
        self._seen = {**recent, session: now}

    @contextmanager
    def listening(self, session: str) -> Iterator[None]:
        """For as long as a connection is open."""
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
