"""The command `tomadiff`."""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoModel

import tomadiff
from tomadiff import made_up, table
from tomadiff.attachment import denoiser
from tomadiff.bench import command as bench
from tomadiff.bench.models import PROMPT, first_call
from tomadiff.config import CHOICES, PRESETS
from tomadiff.demo import show
from tomadiff.demo.embedded import EMBEDDED
from tomadiff.generate import Request, check_writable, draw, save
from tomadiff.inspection import inspect_call
from tomadiff.load import DTYPES, check_device, load
from tomadiff.maps import Recorder
from tomadiff.quality import command as evaluation
from tomadiff.quality import tune
from tomadiff.settings import load as load_settings
from tomadiff.ui import command as page
from tomadiff.viz import beside, merge_map

SETTINGS = (
    "ratio",
    "method",
    "where",
    "regions",
    "region_size",
    "assign",
    "share",
    "remember",
    "dense_steps",
    "dense_every",
    "dense_last_steps",
    "dense_blocks",
    "dense_last_blocks",
    "shift",
    "weigh_keys",
)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except (ValueError, OSError, ImportError) as error:
        print(f"tomadiff: {error}", file=sys.stderr)
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
        "--at", type=int, nargs="+", metavar="STEP", help="steps to draw (first, middle and last)"
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
        default=2,
        help="of a class: blocks in a list, 0 for all (default: %(default)s)",
    )
    inspecting.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="of a pipeline: in pixels")
    inspecting.add_argument("--device", default="cpu")
    inspecting.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    listing = command("families", families, "list the supported architectures")
    listing.add_argument("--refused", action="store_true", help="what is refused, and why, instead")
    listing.add_argument("--markdown", action="store_true", help="as in docs/families.md")
    return root


def add_picture_arguments(added: argparse.ArgumentParser, output: str) -> None:
    added.add_argument("prompt")
    added.add_argument("-o", "--output", type=Path, default=Path(output), help=f"default: {output}")
    added.add_argument(
        "--model",
        default=next(iter(EMBEDDED)),
        help=f"{' or '.join(EMBEDDED)}, a folder, or a hub id (default: %(default)s)",
    )
    added.add_argument("--seed", type=int, default=0)
    added.add_argument("--steps", type=int)
    added.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="in pixels")
    added.add_argument("--guidance", type=float)
    added.add_argument("--device", default="cpu")
    added.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    settings = added.add_argument_group("merging")
    settings.add_argument("--settings", type=Path, metavar="FILE", help="all of this, from a settings file")
    settings.add_argument(
        "--ratio",
        type=_ratio,
        help="share of tokens removed, also by level or by steps, as in '{2: 0.75, 4: 0.25}' and "
        "'[(0, 0.25), (0.5, 0.75)]' (default: the method's own)",
    )
    settings.add_argument("--preset", choices=list(PRESETS))
    for name in ("method", "where", "regions", "assign", "share"):
        settings.add_argument(f"--{name}", choices=CHOICES[name])
    settings.add_argument("--region-size", type=int)
    for name in ("--dense-steps", "--dense-last-steps"):
        settings.add_argument(name, type=_steps, help="a number of them, or a share below 1")
    for name in ("--dense-every", "--dense-blocks", "--dense-last-blocks"):
        settings.add_argument(name, type=int)
    settings.add_argument("--remember", action=argparse.BooleanOptionalAction, default=None)
    settings.add_argument("--shift", action="store_true", default=None)
    settings.add_argument("--weigh-keys", action="store_true", default=None)


def generate(args: argparse.Namespace) -> None:
    """Make pictures, by default with an embedded model; the settings are written into the PNG."""
    if args.num_images < 1:
        raise ValueError(f"--num-images {args.num_images} must be at least 1")
    outputs = [args.output]
    if args.num_images > 1:
        outputs = [args.output.with_stem(f"{args.output.stem}-{n}") for n in range(1, args.num_images + 1)]
    pipe, first = prepare(args)
    if args.compare:
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
            settings |= {"steps": request.steps, "tomadiff": tomadiff.report(pipe).settings}
        print(f"{output}: {seconds:.2f} s" + (f", dense {dense[1]:.2f} s" if dense else ""))
        if dense:
            ratio = settings["tomadiff"]["ratio"]
            labels = [f"dense, {dense[1]:.2f} s", f"ratio {ratio}, {seconds:.2f} s"]
            picture = beside([dense[0], picture], labels)
        save(picture, output, settings)


def map_merges(args: argparse.Namespace) -> None:
    """Draw which tokens are destinations and which went to them, over the finished picture."""
    pipe, request = prepare(args)
    tomadiff.apply(pipe, args.settings, preset=args.preset, **chosen(args))
    recorder = Recorder(pipe, args.at)
    picture, _ = draw(pipe, request, callback_on_step_end=recorder)
    if not recorder.maps:
        raise ValueError(f"none of the {recorder.seen} steps to draw is merged: see --at and --dense-steps")
    maps = recorder.first_middle_last() if args.at is None else recorder.maps
    labels = [f"step {mapped.step + 1} of {recorder.seen}, {mapped.kind}" for mapped in maps]
    settings = {"prompt": request.prompt, "seed": request.seed, "tomadiff": tomadiff.report(pipe).settings}
    save(beside([merge_map(picture, mapped) for mapped in maps], labels), args.output, settings)
    print(args.output)


def families(args: argparse.Namespace) -> None:
    """List the supported architectures, and what can be merged in them."""
    if args.refused:
        print(table.refused(args.markdown))
    else:
        print(table.markdown() if args.markdown else table.text())


def inspect(args: argparse.Namespace) -> None:
    """List a model's blocks that are alike, with their tokens and shares of time, measured in one call.

    Says which family the model is of, or how to merge in it as it is.
    """
    check_device(args.device)
    dtype = DTYPES[args.dtype]
    if (Path(args.model) / "config.json").exists():  # a model alone
        model = AutoModel.from_pretrained(args.model, dtype=dtype).to(args.device)
        print(inspect_call(model, **made_up.arguments(model)))
        return
    if not made_up.is_class(args.model):
        pipe = load(args.model, args.device, args.dtype)
        size = {"height": args.size[0], "width": args.size[1]} if args.size else {}
        call, named = first_call(pipe, {"prompt": PROMPT, **size})
        model = denoiser(pipe)[0]
        with torch.no_grad():
            model(*call, **named)  # the first call pays for warming up
        print(inspect_call(model, *call, **named))
        return
    model = made_up.build(args.model, args.depth, dtype, args.device)
    inspection = inspect_call(model, **made_up.arguments(model))
    inspection.deepen(made_up.build(args.model, 0, dtype, "meta"))
    print(inspection)


def prepare(args: argparse.Namespace) -> tuple[Any, Request]:
    """The pipeline and what to ask of it; mistakes come up before anything long starts."""
    check_writable(args.output)
    if args.settings is not None and (args.preset is not None or chosen(args)):
        raise ValueError(f"--settings {args.settings} has all settings in it: leave out the others")
    if args.settings is not None:
        load_settings(args.settings)
    elif args.preset is None:
        tomadiff.Config(**chosen(args))
    pipe = load(args.model, args.device, args.dtype)
    size = tuple(args.size) if args.size else None
    return pipe, Request(args.prompt, args.seed, args.steps, size, args.guidance)


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """The settings given on the command line."""
    return {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}


def _steps(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _ratio(text: str) -> Any:
    """As for a call; `Config` says what is wrong with it."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    sys.exit(main())
