"""The command `tomadiff`, and `python -m tomadiff`."""

from __future__ import annotations

import logging


def main() -> int:
    # in every process, it says at length that it does without torchvision
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from .cli import main as run

    return run()


if __name__ == "__main__":
    raise SystemExit(main())
