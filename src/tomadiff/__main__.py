"""The command `tomadiff`, and `python -m tomadiff`."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

formatted_by_python = warnings.formatwarning


def main() -> int:
    with quiet_interrupt():
        # transformers warns at length without torchvision; it reads this when it is imported
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        warnings.formatwarning = formatted
        from .tools import cli

        command, args = cli.prepare()
    return cli.execute(command, args)


@contextlib.contextmanager
def quiet_interrupt() -> Iterator[None]:
    """End at once on Ctrl-C, without a traceback out of the imports; there is nothing to save yet."""

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # a process in the background may have to ignore it
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Our warnings look like our errors: a line of our code tells nothing to whoever runs a command."""
    if Path(__file__).parent in Path(filename).parents:
        return f"tomadiff: {message}\n"
    return formatted_by_python(message, category, filename, lineno, line)


if __name__ == "__main__":
    raise SystemExit(main())
