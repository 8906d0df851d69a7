"""Allow only one call of a model at a time, since plans, spans and histories belong to one call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tomadiff.errors import ConfigError


class CallGuard:
    """Lets one thread into a model at a time."""

    def __init__(self) -> None:
        self._caller: threading.Thread | None = None  # the thread that is in the model now
        self._copying = False
        self._changed = threading.Condition()

    def enter(self) -> bool:
        """Begin a call; returns False if the last one was interrupted before it could leave."""
        with self._changed:
            self._changed.wait_for(lambda: not self._copying)
            me, other = threading.current_thread(), self._caller
            if other is not None and other is not me and other.is_alive():
                raise ConfigError(
                    f"{me.name} called this model in the middle of a call by {other.name}, and tomadiff can "
                    "do one at a time: take turns, or give each thread a copy.deepcopy of the pipeline. (If "
                    "nothing else runs, that call was interrupted: tomadiff.apply again.)"
                )
            self._caller = me
        return other is None

    def leave(self) -> None:
        with self._changed:
            self._caller = None
            self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for calls of other threads to end, and let no new ones begin inside the `with` block."""
        me = threading.current_thread()
        with self._changed:
            free = (None, me)  # a call of this thread was interrupted, or is waiting for this block
            self._changed.wait_for(
                lambda: not self._copying and (self._caller in free or not self._caller.is_alive())
            )
            self._copying = True
        try:
            yield
        finally:
            with self._changed:
                self._copying = False
                self._changed.notify_all()
