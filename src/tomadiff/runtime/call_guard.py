"""One call of a model at a time: plans, spans and histories are for one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tomadiff.errors import ConfigError


class CallGuard:
    """Lets one thread into a model at a time."""

    def __init__(self) -> None:
        self._caller: threading.Thread | None = None  # while it is in the model
        self._copying = False
        self._changed = threading.Condition()

    def enter(self) -> bool:
        """Begin a call; False if an interrupt ended the last one on the way, before it could leave."""
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
        """With nobody in the model: others' calls end before, and begin after."""
        me = threading.current_thread()
        with self._changed:
            free = (None, me)  # a call of this very thread was interrupted, or waits for us
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
