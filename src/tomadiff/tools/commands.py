"""`tomadiff generate`, `tomadiff merge-map` and `tomadiff inspect`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import tomadiff
from tomadiff.runtime.registration import denoiser
from tomadiff.settings_file import load as load_settings

from . import dummy_inputs
from .arguments.names import EMBEDDED
from .arguments.pictures import SETTINGS
from .bench.models import PROMPT, first_call
from .drawing import beside, draw_merge_map
from .evaluate.metrics import psnr
from .evaluate.pictures import as_tensor
from .generate import Request, check_output, draw, save
from .inspect import inspect_call
from .loading import DTYPES, check_device, load, load_model
from .merge_map import Recorder


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
            pass  # raises if this model can't honour the settings, before a dense picture is drawn
        draw(pipe, Request(first.prompt, steps=1, size=first.size))  # warm-up
    for number, output in enumerate(outputs):
        request = Request(first.prompt, args.seed + number, first.steps, first.size, first.guidance)
        dense = draw(pipe, request) if args.compare else None
        with tomadiff.merged(pipe, args.settings, preset=args.preset, **chosen(args)):
            if tomadiff.report(pipe).settings["auto"]:  # measure first, outside of the picture's time
                draw(pipe, Request(first.prompt, steps=1, size=first.size, guidance=first.guidance))
            picture, seconds = draw(pipe, request)
            settings = {
                "prompt": request.prompt,
                "seed": request.seed,
                "model": args.model,
                "seconds": seconds,
            }
            settings |= {"steps": request.steps, "size": request.size, "guidance": request.guidance}
            report = tomadiff.report(pipe)
            settings["tomadiff"] = report.settings
        if dense:
            apart = psnr(as_tensor([dense[0]]), as_tensor([picture])).item()
            close = "the same picture" if math.isinf(apart) else f"PSNR to the dense picture {apart:.1f} dB"
            told = f"{output}: {seconds:.2f} s, dense {dense[1]:.2f} s: {dense[1] / seconds:.2f}x; {close}"
            asked = ", ".join(f"{name}={value}" for name, value in report.asked.items()) or "apply(pipe)"
            labels = [f"dense, {dense[1]:.2f} s", f"{asked}, {seconds:.2f} s"]
            picture = beside([dense[0], picture], labels)
        else:
            told = f"{output}: {seconds:.2f} s"
        save(picture, output, settings)
        print(told)


def merge_map(args: argparse.Namespace) -> None:
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
    save(beside([draw_merge_map(picture, mapped) for mapped in maps], labels), args.output, settings)
    print(args.output)


def inspect(args: argparse.Namespace) -> None:
    """List a model's blocks that are alike, with their tokens and shares of a call's time.

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
    if (Path(args.model) / "config.json").exists():  # a single model without a pipeline
        model = load_model(Path(args.model), args.device, args.dtype)
        print(inspect_call(model, **dummy_inputs.arguments(model)))
        return
    if not is_class:
        names = [*EMBEDDED, "the model classes of diffusers"]
        pipe = load(args.model, args.device, args.dtype, names, args.trust_remote_code)
        size = {"height": args.size[0], "width": args.size[1]} if args.size else {}
        call, named = first_call(pipe, {"prompt": PROMPT, **size})
        model = denoiser(pipe)[0]
        print(inspect_call(model, *call, **named))
        return
    model = dummy_inputs.build(args.model, depth, dtype, args.device)
    inspection = inspect_call(model, **dummy_inputs.arguments(model))
    inspection.deepen(dummy_inputs.build(args.model, 0, dtype, "meta"))
    print(inspection)


def prepare(args: argparse.Namespace) -> tuple[Any, Request]:
    """The pipeline and the request; mistakes in the arguments are found before the model is loaded."""
    check_output(args.output)
    check_seed(args.seed)
    if not args.prompt.strip():
        raise ValueError("there is no prompt: say what to draw")
    if args.settings is not None and (args.preset is not None or chosen(args)):
        raise ValueError(f"--settings {args.settings} has all settings in it: leave out the others")
    if args.settings is not None:
        load_settings(args.settings)
    else:
        tomadiff.Config(preset=args.preset, **chosen(args))
    trusted, offload = args.trust_remote_code, args.offload
    pipe = load(args.model, args.device, args.dtype, trust_remote_code=trusted, offload=offload)
    size = tuple(args.size) if args.size else None
    return pipe, Request(args.prompt, args.seed, args.steps, size, args.guidance)


def check_seed(seed: int) -> None:
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"--seed: {seed} is beyond what a generator of noise takes, 64 bits")


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """The settings given on the command line."""
    return {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
