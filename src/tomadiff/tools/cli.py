"""The command `tomadiff`: its subcommands, and what happens when one fails.

Arguments are parsed before the command itself is imported: that takes seconds, since torch and diffusers come
with it.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

import tomadiff

from .arguments import bench, demo, evaluate, models, pictures, selftest, tune, ui


@dataclass(frozen=True)
class Command:
    name: str
    summary: str  # its line in `tomadiff --help`
    description: str  # the first lines of its own help
    add_arguments: Callable[[argparse.ArgumentParser], None]
    function: str  # what runs it, as "module:function" of this package


COMMANDS = (
    Command(
        "demo",
        "compare dense, forecast and merged pictures of the embedded models",
        "Draw a few prompts with the embedded models, from the same noise: dense, as apply(pipe) chooses, "
        "and merged.",
        demo.add_arguments,
        "demo.show:run",
    ),
    Command(
        "selftest",
        "check that all is well on this machine, above all on a GPU",
        "Check kernels, forecast, merged and compiled pictures on this machine, and measure what they gain: "
        "the first thing to run on a GPU, five minutes at most.",
        selftest.add_arguments,
        "selftest.command:run",
    ),
    Command(
        "generate",
        "make pictures with any pipeline",
        "Make pictures, by default with an embedded model. The settings are written into the PNG.",
        pictures.add_generate_arguments,
        "commands:generate",
    ),
    Command(
        "merge-map",
        "draw which tokens are merged into which",
        "Draw destinations and the tokens that are merged into them, over the finished picture.",
        pictures.add_merge_map_arguments,
        "commands:merge_map",
    ),
    Command(
        "bench",
        "measure which method is faster, and by how much",
        "Time methods against each other, in turns, on single calls of a model or on whole generations.",
        bench.add_arguments,
        "bench.command:run",
    ),
    Command(
        "eval",
        "measure what each method does to pictures",
        "Draw prompts dense and with each method, from the same noise, and measure how they differ.",
        evaluate.add_arguments,
        "evaluate.command:run",
    ),
    Command(
        "ui",
        "compare pictures in the browser",
        "Serve a page with pictures dense and merged, merge maps and sweeps.",
        ui.add_arguments,
        "ui.command:run",
    ),
    Command(
        "tune",
        "find the fastest settings that keep pictures close enough",
        "Find the fastest settings within a budget of fidelity, on a few prompts, and write them to a file.",
        tune.add_arguments,
        "tune:run",
    ),
    Command(
        "inspect",
        "show where a model spends its time, and how to merge there",
        "List a model's groups of equal blocks, with their tokens and shares of the time, in one call; "
        "tell its family, or how to merge in it without one.",
        models.add_inspect_arguments,
        "commands:inspect",
    ),
    Command(
        "families",
        "list the supported architectures",
        "List the supported architectures, and what can be merged in them.",
        models.add_families_arguments,
        "family_table:run",
    ),
)


Run = Callable[[argparse.Namespace], int | None]


def main(argv: list[str] | None = None) -> int:
    return execute(*prepare(argv))


def prepare(
    argv: list[str] | None = None,
) -> tuple[Run, argparse.Namespace]:
    """Parse the arguments, then import what runs the command."""
    args = parser().parse_args(argv)
    return pkgutil.resolve_name(f"{__package__}.{args.function}"), args


def execute(function: Run, args: argparse.Namespace) -> int:
    """Run a command; returns its exit status."""
    try:
        status = function(args) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        return 141  # what a shell reports for SIGPIPE
    except (ValueError, OSError, ImportError) as error:
        print(f"tomadiff: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        from tomadiff.runtime.machine import out_of_memory

        if not out_of_memory(error):
            raise
        reason = str(error).strip().splitlines()[0]
        print(f"tomadiff: out of memory: take a smaller size, batch or --dtype ({reason})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntomadiff: interrupted; what was finished is kept", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        "tomadiff", description="Faster diffusion models, by merging tokens and forecasting steps."
    )
    root.add_argument("--version", action="version", version=tomadiff.__version__)
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        added = commands.add_parser(command.name, help=command.summary, description=command.description)
        command.add_arguments(added)
        added.set_defaults(function=command.function)
    return root


if __name__ == "__main__":
    sys.exit(main())
