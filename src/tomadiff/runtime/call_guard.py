"""One call of a model at a time: plans, runs and memories are for one."""

from __future__ import annotations

import threading

from tomadiff.errors import ConfigError


class Door:
    """Lets one thread into a model."""

    def __init__(self) -> None:
        self._caller: threading.Thread | None = None  # while it is in the model
        self._lock = threading.Lock()

    def enter(self) -> bool:
        """Begin a call; False if an interrupt ended the last one on the way, before it could leave."""
        with self._lock:
            me, other = threading.current_thread(), self._caller
            if other is not None and other is not me and other.is_alive():
                raise ConfigError(
                    f"{me.name} called this model in the middle of a call by {other.name}, and merging can "
                    "do one at a time: take turns, or give each thread a copy.deepcopy of the pipeline. (If "
                    "nothing else runs, that call was interrupted: tomadiff.apply again.)"
                )
            self._caller = me
        return other is None

    def leave(self) -> None:
        self._caller = None

    def inside(self) -> bool:
        """Whether this thread is; not if it was refused, in the middle of another's call."""
        return self._caller is threading.current_thread()
