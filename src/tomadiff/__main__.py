"""The command `tomadiff`, and `python -m tomadiff`."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

formatted_by_python = warnings.formatwarning


def main() -> int:
    # in every process, it says at length that it does without torchvision
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.formatwarning = formatted
    from .tools.cli import main as run

    return run()


def formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Our warnings as our errors are: to whoever runs a command, a line of our code tells nothing."""
    if Path(__file__).parent in Path(filename).parents:
        return f"tomadiff: {message}\n"
    return formatted_by_python(message, category, filename, lineno, line)


if __name__ == "__main__":
    raise SystemExit(main())
