"""`tomadiff eval`: what methods do to pictures, and to the time they take."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tomadiff.models import Family, find_family
from tomadiff.runtime.files import atomic_write, locked, printable
from tomadiff.runtime.registration import denoiser
from tomadiff.tools import samplers
from tomadiff.tools.arguments.evaluate import PROTOCOLS
from tomadiff.tools.arguments.names import EMBEDDED
from tomadiff.tools.loading import check_device, check_offload, check_threads, load
from tomadiff.tools.method_spec import DENSE, OURS, check_fit, pairs, warn_of_files

from . import scores, summary
from .engines import local
from .engines import ray as ray_engine
from .job import REFERENCE, Contender, Drawing, Job, Work
from .pictures import open_picture
from .prompts import check_prompts, load_prompts
from .resolved import resolved
from .store import Row, Store, check_free, folder_for
from .weights import WEIGHTS, fetch

USUAL: dict[str, Any] = {"seeds": 1, "ratio": [0.5], "metrics": list(summary.METRICS)}


def run(args: argparse.Namespace) -> int:
    """`tomadiff eval`."""
    if args.fetch:
        for name in WEIGHTS:
            print(fetch(name))
        return 0
    resolve_arguments(args)
    check_free(args.output, args.resume)
    prompts, seeds = load_prompts(args.prompts, args.limit), range(args.seeds)
    job = make_job(args, prompts)
    metrics = make_metrics(args)
    with locked(args.output):
        return draw_and_score(args, prompts, seeds, Store(args.output, job, args.resume), metrics)


def draw_and_score(
    args: argparse.Namespace, prompts: Sequence[str], seeds: range, store: Store, metrics: scores.Metrics
) -> int:
    """Draw what is missing; then score and print what there is, also after an interruption."""
    if metrics.unavailable:
        missing = ", ".join(summary.METRICS[metric][0] for metric in metrics.unavailable)
        print(f"not available: {missing}; how to get them is said below the table", file=sys.stderr)
    if store.damaged:
        print(f"{len(store.damaged)} pictures are damaged: drawn again where asked for", file=sys.stderr)
    works = store.missing(prompts, seeds)
    ended, status = "", 0
    try:
        draw_all(store, works, engine(args, store.job, works))
    except KeyboardInterrupt:
        ended, status = "interrupted", 130
    except ray_engine.ClusterError as error:
        if not store.rows:
            raise
        ended, status = f"tomadiff: {error}", 2
    if ended:
        print(f"\n{ended}: what follows covers what was finished; continue with --resume", file=sys.stderr)
    score_and_report(store, store.asked(prompts, seeds), metrics)
    return status


def resolve_arguments(args: argparse.Namespace) -> None:
    """Fill in defaults and those of a protocol, and refuse arguments that make no sense."""
    for name, value in (USUAL | PROTOCOLS.get(args.protocol, {})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    default_prompts(args)
    args.output = args.output or folder_for("evaluation", args.model)
    check_counts(args)
    if args.engine == "ray":
        ray_engine.check(args.address)
        check_gpus(args.device, args.gpus_per_worker)
    elif args.address or args.workers or args.gpus_per_worker:
        raise ValueError("--address, --workers and --gpus-per-worker are for --engine ray")
    else:
        check_device(args.device)
    check_offload(args.offload, args.device)


def default_prompts(args: argparse.Namespace) -> None:
    if args.prompts is None:
        args.prompts = "embedded" if args.model in EMBEDDED else "imagenet"


def check_counts(args: argparse.Namespace) -> None:
    for name in ("seeds", "limit", "threads", "workers", "steps"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    check_threads(args.threads)


def check_gpus(device: str, gpus_per_worker: float) -> None:
    """Check the arguments only: the workers may have GPUs where this machine has none."""
    if gpus_per_worker < 0:
        raise ValueError(f"--gpus-per-worker {gpus_per_worker:g} must not be negative")
    if device.startswith("cuda:"):
        raise ValueError(f"--device {device}: Ray chooses the GPU of each worker; take --device cuda")
    if device == "cuda" and not gpus_per_worker:
        raise ValueError(
            "--device cuda on Ray needs --gpus-per-worker: Ray hides GPUs that were not requested"
        )
    if gpus_per_worker and device != "cuda":
        raise ValueError(f"--gpus-per-worker {gpus_per_worker:g} needs --device cuda, not {device}")


def make_job(args: argparse.Namespace, prompts: Sequence[str]) -> Job:
    """Load the model once to see what it allows, before hours of work."""
    pipe = load(args.model, "cpu", args.dtype, trust_remote_code=args.trust_remote_code)
    if args.scheduler:
        pipe.scheduler = samplers.scheduler_by_name(args.scheduler, pipe.scheduler)
    check_prompts(pipe, prompts)
    model = denoiser(pipe)[0]
    family, methods = find_family(model), [method for method in args.methods or [OURS] if method != DENSE]
    contenders, left_out = pairs(methods, args.ratio, family)
    check_fit(pipe, contenders)
    warn_of_files(methods, model)
    for line in left_out:
        print(line, file=sys.stderr)
    return job_of(args, [REFERENCE, *contenders], family)


def job_of(args: argparse.Namespace, contenders: Sequence[Contender], family: Family | None) -> Job:
    """The job for these contenders."""
    return Job(
        model=args.model,
        contenders=tuple(contenders),
        settings={contender: resolved(*contender, family) for contender in contenders},
        steps=args.steps,
        size=tuple(args.size) if args.size else None,
        guidance=args.guidance,
        scheduler=args.scheduler,
        dtype=args.dtype,
        device=args.device,
        threads=args.threads
        or torch.get_num_threads(),  # results are rounded differently with another number
        trust_remote_code=args.trust_remote_code,
        offload=args.offload,
    )


def make_metrics(args: argparse.Namespace) -> scores.Metrics:
    """The metrics that were asked for, as far as they are available."""
    device = args.device
    try:
        check_device(device)
    except ValueError:  # the workers may have such a device
        device = "cpu"
        print(f"pictures are measured on the CPU: there is no {args.device} here", file=sys.stderr)
    return scores.load_metrics(
        scores.MetricOptions(args.metrics, args.clip_model, args.dino_model, args.fid_against, device)
    )


def engine(args: argparse.Namespace, job: Job, works: Sequence[Work]) -> Iterator[Drawing]:
    if args.engine == "ray":
        cluster = ray_engine.Cluster(args.address, args.workers, args.gpus_per_worker, args.patience)
        return ray_engine.run(job, works, cluster)
    return local.run(job, works)


def draw_all(store: Store, works: Sequence[Work], drawings: Iterator[Drawing]) -> None:
    """Store pictures as they come, and print the progress."""
    total, begin = sum(len(work.contenders) for work in works), time.perf_counter()
    if not total:
        print("everything is drawn already", file=sys.stderr)
        return
    for done, drawing in enumerate(drawings, 1):
        store.add(drawing)
        left = (time.perf_counter() - begin) / done * (total - done)
        unit = f"{left / 60:.0f} min" if left >= 60 else f"{left:.0f} s"
        what = f"{drawing.label}: {printable(drawing.prompt)}, seed {drawing.seed}"
        print(f"[{done}/{total}, {unit} left] {what}, {drawing.seconds:.2f} s", file=sys.stderr)


def score_and_report(store: Store, asked: Sequence[Row], metrics: scores.Metrics) -> None:
    """Score the pictures that were asked for, then write and print the summary."""
    if not asked:
        return
    rows, sets = scores.score(store, asked, metrics)
    contenders = store.job.contenders
    lines = summary.summarise(rows, contenders, sets)
    text = summary.table(lines, metrics.unavailable)
    content = {"job": store.job.to_dict(), "lines": lines, "not available": metrics.unavailable}
    atomic_write(store.folder / "summary.json", lambda path: path.write_text(json.dumps(content, indent=1)))
    atomic_write(store.folder / "summary.md", lambda path: path.write_text(text + "\n"))
    atomic_write(store.folder / "summary.csv", lambda path: summary.write_csv(lines, path))
    print(text)
    if len(contenders) > 1 and any(line.get("psnr") is not None for line in lines):
        try:
            summary.pareto_plot(
                lines,
                "psnr",
                f"{store.job.model}: closeness to the dense picture",
                store.folder / "pareto.png",
            )
        except ImportError as error:
            print(error, file=sys.stderr)
        sheet = summary.cases(rows, contenders, lambda row: open_picture(store.path(row)))
        if sheet is not None:
            atomic_write(store.folder / "cases.png", lambda path: sheet.save(path, "PNG"))
    print(f"pictures, rows and plots are in {store.folder}")
