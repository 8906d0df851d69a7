"""The command `tomadiff`."""

from __future__ import annotations

import argparse
import sys

from . import FAMILIES, __version__
from .bench import speed
from .demo import random_sdxl


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("tomadiff", description="Token merging for diffusion models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    families = commands.add_parser("families", help="list the supported architectures")
    families.set_defaults(run=lambda args: print(*FAMILIES, sep="\n"))
    bench = commands.add_parser(
        "bench", help="measure the speed on SDXL's UNet", description=speed.run.__doc__
    )
    speed.add_arguments(bench)
    bench.set_defaults(run=speed.run)
    demo = commands.add_parser(
        "demo", help="show what merging does on a small model", description=random_sdxl.run.__doc__
    )
    demo.set_defaults(run=random_sdxl.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args) or 0
    except ValueError as error:
        print(f"tomadiff: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
