"""The command `tomadiff`."""

from __future__ import annotations

import argparse
import ast
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

import tomadiff
from tomadiff.config import CHOICES, PRESETS
from tomadiff.runtime.machine import out_of_memory
from tomadiff.runtime.registration import denoiser
from tomadiff.settings_file import load as load_settings

from . import dummy_inputs, family_table, tune
from .bench import command as bench
from .bench.models import PROMPT, first_call
from .demo import show
from .demo.embedded import EMBEDDED
from .drawing import beside, merge_map
from .evaluate import command as evaluation
from .evaluate.metrics import psnr
from .generate import Request, add_request_arguments, check_output, draw, save
from .inspect import inspect_call
from .loading import (
    DTYPES,
    add_device_arguments,
    add_trust_argument,
    check_device,
    load,
    load_model,
)
from .merge_map import Recorder
from .ui import command as page

SETTINGS = (
    "interval",
    "ratio",
    "method",
    "where",
    "regions",
    "region_size",
    "assign",
    "share",
    "dense_blocks",
    "dense_last_blocks",
    "shift",
    "weigh_keys",
)


HELPS = {
    "method": "the paper's, or one to compare with",
    "where": "around each block, each module in it, a span of blocks, or only keys and values",
    "regions": "tokens that may be merged with each other",
    "assign": "to destinations of a token's own region, or of all",
    "share": "one plan for all sites of a kind, or one for each block",
}


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        status = args.run(args) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read our output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return 141  # as a shell tells it
    except (ValueError, OSError, ImportError) as error:
        print(f"tomadiff: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        reason = str(error).strip().splitlines()[0]
        print(f"tomadiff: out of memory: take a smaller size, batch or --dtype ({reason})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntomadiff: interrupted; what was finished is kept", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser("tomadiff", description="Token merging for diffusion models.")
    root.add_argument("--version", action="version", version=tomadiff.__version__)
    commands = root.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=run.__doc__)
        added.set_defaults(run=run)
        return added

    show.add_arguments(command("demo", show.run, "show what merging does, on the embedded models"))
    generating = command("generate", generate, "make pictures with any pipeline")
    add_picture_arguments(generating, "out.png")
    generating.add_argument("--num-images", type=int, default=1, help="with seeds that count up")
    generating.add_argument(
        "--compare", action="store_true", help="put the dense picture beside, with both times"
    )
    mapping = command("merge-map", map_merges, "draw which tokens went where")
    add_picture_arguments(mapping, "merge-map.png")
    mapping.add_argument(
        "--at",
        type=int,
        nargs="+",
        metavar="STEP",
        help="merged steps to draw, counted from 1 (default: the first, a middle and the last one)",
    )
    bench.add_arguments(command("bench", bench.run, "measure who is faster, and by how much"))
    evaluation.add_arguments(command("eval", evaluation.run, "measure what merging does to pictures"))
    page.add_arguments(command("ui", page.run, "show what merging does, in the browser"))
    tune.add_arguments(command("tune", tune.run, "find the fastest settings within a budget of fidelity"))
    inspecting = command("inspect", inspect, "show where a model spends its time, and how to merge there")
    inspecting.add_argument(
        "model",
        help=f"{', '.join(EMBEDDED)}, a folder, a hub id, or the name of a class of diffusers, which is made "
        "with random weights",
    )
    inspecting.add_argument(
        "--depth",
        type=int,
        help="of a class: blocks in a list, 0 for all (default: 2)",
    )
    inspecting.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="of a pipeline: in pixels")
    add_device_arguments(inspecting)
    add_trust_argument(inspecting)
    listing = command("families", families, "list the supported architectures")
    listing.add_argument("--refused", action="store_true", help="what is refused, and why, instead")
    listing.add_argument("--markdown", action="store_true", help="as in docs/families.md")
    return root


def add_picture_arguments(added: argparse.ArgumentParser, output: str) -> None:
    added.add_argument("prompt", help="what to draw; the embedded models know 48 names")
    added.add_argument("-o", "--output", type=Path, default=Path(output), help=f"default: {output}")
    added.add_argument(
        "--model",
        default=next(iter(EMBEDDED)),
        help=f"{' or '.join(EMBEDDED)}, a folder, or a hub id (default: %(default)s)",
    )
    added.add_argument("--seed", type=int, default=0, help="of the noise (default: %(default)s)")
    add_request_arguments(added)
    add_device_arguments(added)
    add_trust_argument(added)
    settings = added.add_argument_group("merging")
    settings.add_argument("--settings", type=Path, metavar="FILE", help="all of this, from a settings file")
    settings.add_argument(
        "--interval",
        type=_value,
        help="run the model in every so many-th step, and forecast its output in the others; or a list of "
        "the steps that run, as in '[0, 1, 4, 7]'; or auto (default: auto, or 1 with a ratio)",
    )
    settings.add_argument(
        "--ratio",
        type=_value,
        help="share of tokens removed, also by level or by steps, as in '{2: 0.75, 4: 0.25}' and "
        "'[(0, 0.25), (0.5, 0.75)]'; or auto: merge only where that gains here (default: the method's own)",
    )
    settings.add_argument("--preset", choices=list(PRESETS), help="a variant of the paper")
    for name, about in HELPS.items():
        # the ideal is a limit of speed, and its pictures are noise
        choices = [choice for choice in CHOICES[name] if choice != "ideal"]
        settings.add_argument(f"--{name}", choices=choices, help=about)
    settings.add_argument("--region-size", type=int, metavar="N", help="tokens on the side of a tile")
    for name, which in (("--dense-blocks", "first"), ("--dense-last-blocks", "last")):
        about = f"leave the {which} so many blocks of each kind dense"
        settings.add_argument(name, type=int, metavar="N", help=about)
    settings.add_argument(
        "--shift", action="store_true", default=None, help="regions in two layouts that take turns"
    )
    settings.add_argument(
        "--weigh-keys", action="store_true", default=None, help="a merged key counts as often as its tokens"
    )


def generate(args: argparse.Namespace) -> None:
    """Make pictures, by default with an embedded model; the settings are written into the PNG."""
    if args.num_images < 1:
        raise ValueError(f"--num-images {args.num_images} must be at least 1")
    check_seed(args.seed + args.num_images - 1)
    outputs = [args.output]
    if args.num_images > 1:
        outputs = [args.output.with_stem(f"{args.output.stem}-{n}") for n in range(1, args.num_images + 1)]
    pipe, first = prepare(args)
    if args.compare:
        with tomadiff.merged(pipe, args.settings, preset=args.preset, **chosen(args)):
            pass  # what this model can't honour comes up before a dense picture is drawn
        draw(pipe, Request(first.prompt, steps=1, size=first.size))  # whoever goes first pays for warming up
    for number, output in enumerate(outputs):
        request = Request(first.prompt, args.seed + number, first.steps, first.size, first.guidance)
        dense = draw(pipe, request) if args.compare else None
        with tomadiff.merged(pipe, args.settings, preset=args.preset, **chosen(args)):
            if tomadiff.report(pipe).settings["auto"]:  # finding out where to merge is not the picture's time
                draw(pipe, Request(first.prompt, steps=1, size=first.size, guidance=first.guidance))
            picture, seconds = draw(pipe, request)
            settings = {
                "prompt": request.prompt,
                "seed": request.seed,
                "model": args.model,
                "seconds": seconds,
            }
            settings |= {"steps": request.steps, "size": request.size, "guidance": request.guidance}
            settings["tomadiff"] = tomadiff.report(pipe).settings
        if dense:
            apart = psnr(show.as_tensor([dense[0]]), show.as_tensor([picture])).item()
            close = "the same picture" if math.isinf(apart) else f"PSNR to the dense picture {apart:.1f} dB"
            told = f"{output}: {seconds:.2f} s, dense {dense[1]:.2f} s: {dense[1] / seconds:.2f}x; {close}"
            ratio = settings["tomadiff"]["ratio"]
            labels = [f"dense, {dense[1]:.2f} s", f"ratio {ratio}, {seconds:.2f} s"]
            picture = beside([dense[0], picture], labels)
        else:
            told = f"{output}: {seconds:.2f} s"
        save(picture, output, settings)
        print(told)


def map_merges(args: argparse.Namespace) -> None:
    """Draw which tokens are destinations and which went to them, over the finished picture."""
    for step in args.at or ():
        if step < 1 or step > (args.steps or step):
            raise ValueError(f"--at: step {step} is none of {args.steps or 'the steps'}, counted from 1")
    pipe, request = prepare(args)
    settings = chosen(args)
    if args.settings is None and args.preset is None:
        settings = {"ratio": 0.5, **settings}  # by default, steps may be forecast, and nothing merged
    tomadiff.apply(pipe, args.settings, preset=args.preset, **settings)
    recorder = Recorder(pipe)
    picture, _ = draw(pipe, request, callback_on_step_end=recorder)
    if not recorder.maps:
        found = "".join(f" ({answer})" for answer in tomadiff.report(pipe).auto)
        raise ValueError(f"none of the {recorder.seen} steps is merged: give --ratio 0.5{found}")
    merged = {mapped.step + 1: mapped for mapped in recorder.maps}
    for step in args.at or ():
        if step not in merged:
            what = "is dense" if 1 <= step <= recorder.seen else f"is none of the {recorder.seen}"
            raise ValueError(f"--at: step {step} {what}; merged are {', '.join(map(str, merged))}")
    maps = [merged[step] for step in args.at] if args.at else recorder.first_middle_last()
    labels = [f"step {mapped.step + 1} of {recorder.seen}, {mapped.kind}" for mapped in maps]
    settings = {"prompt": request.prompt, "seed": request.seed, "tomadiff": tomadiff.report(pipe).settings}
    save(beside([merge_map(picture, mapped) for mapped in maps], labels), args.output, settings)
    print(args.output)


def families(args: argparse.Namespace) -> None:
    """List the supported architectures, and what can be merged in them."""
    if args.refused:
        print(family_table.refused(args.markdown))
    elif args.markdown:
        print(family_table.markdown())
    elif sys.stdout.isatty():
        print(family_table.narrow(shutil.get_terminal_size().columns))
    else:
        print(family_table.text())


def inspect(args: argparse.Namespace) -> None:
    """List a model's blocks that are alike, with their tokens and shares of time, measured in one call.

    Says which family the model is of, or how to merge in it as it is.
    """
    check_device(args.device)
    dtype, is_class = DTYPES[args.dtype], dummy_inputs.is_class(args.model)
    depth = 2 if args.depth is None else args.depth
    if depth < 0:
        raise ValueError(f"--depth {depth} must be at least 0")
    if args.depth is not None and not is_class:
        raise ValueError(f"--depth is for classes of diffusers, and {args.model!r} is as deep as it is")
    if args.size and (is_class or (Path(args.model) / "config.json").exists()):
        raise ValueError(f"--size is for pipelines, and {args.model!r} is a model alone: leave it out")
    if (Path(args.model) / "config.json").exists():  # a model alone
        model = load_model(Path(args.model), args.device, args.dtype)
        print(inspect_call(model, **dummy_inputs.arguments(model)))
        return
    if not is_class:
        names = [*EMBEDDED, "the model classes of diffusers"]
        pipe = load(args.model, args.device, args.dtype, names, args.trust_remote_code)
        size = {"height": args.size[0], "width": args.size[1]} if args.size else {}
        call, named = first_call(pipe, {"prompt": PROMPT, **size})
        model = denoiser(pipe)[0]
        with torch.no_grad():
            model(*call, **named)  # the first call pays for warming up
        print(inspect_call(model, *call, **named))
        return
    model = dummy_inputs.build(args.model, depth, dtype, args.device)
    inspection = inspect_call(model, **dummy_inputs.arguments(model))
    inspection.deepen(dummy_inputs.build(args.model, 0, dtype, "meta"))
    print(inspection)


def prepare(args: argparse.Namespace) -> tuple[Any, Request]:
    """The pipeline and what to ask of it; mistakes come up before anything long starts."""
    check_output(args.output)
    check_seed(args.seed)
    if not args.prompt.strip():
        raise ValueError("there is no prompt: say what to draw")
    if args.settings is not None and (args.preset is not None or chosen(args)):
        raise ValueError(f"--settings {args.settings} has all settings in it: leave out the others")
    if args.settings is not None:
        load_settings(args.settings)
    elif args.preset is None:
        tomadiff.Config(**chosen(args))
    pipe = load(args.model, args.device, args.dtype, trust_remote_code=args.trust_remote_code)
    size = tuple(args.size) if args.size else None
    return pipe, Request(args.prompt, args.seed, args.steps, size, args.guidance)


def check_seed(seed: int) -> None:
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"--seed: {seed} is beyond what a generator of noise takes, 64 bits")


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """The settings given on the command line."""
    return {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}


def _value(text: str) -> Any:
    """As for a call; `Config` says what is wrong with it."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    sys.exit(main())
