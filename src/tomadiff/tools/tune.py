"""`tomadiff tune`: the fastest settings that keep pictures as close to the dense ones as is asked for.

A small set of settings draws a few prompts; the better half goes on to more of them, and so on. All that is
drawn and timed is kept by the evaluation's store, so that it can be interrupted and resumed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from tomadiff import settings_file
from tomadiff.config import Config
from tomadiff.errors import ConfigError
from tomadiff.models import Family, family_of
from tomadiff.runtime.files import check_writable, locked
from tomadiff.runtime.machine import processor
from tomadiff.runtime.registration import denoiser
from tomadiff.runtime.sites import find

from .evaluate import scores, summary
from .evaluate.command import check_counts, default_prompts, draw_all, job_of
from .evaluate.job import REFERENCE, Contender, Drawing, ImageGenerator, Work
from .evaluate.prompts import check_prompts, load_prompts
from .evaluate.store import Row, Store, check_free, folder_for
from .generate import Request, draw
from .method_spec import configuration, label, pairs, written
from .step_placement import placements

BUDGETS = ("psnr", "ssim")
STRIDES = (4, 2, 1)  # a quarter of the prompts, half of them, all
CALIBRATION = 2  # dense pictures from which the placement of the steps that run is computed
MIN_SPEEDUP = 1.02  # smaller ones can't be told from noise
Budget = dict[str, float]


def run(args: argparse.Namespace) -> int:
    """Find the fastest settings within a budget of fidelity, from a few prompts, and write them to a file."""
    budget = {name: getattr(args, name) for name in BUDGETS if getattr(args, name) is not None}
    check(args, budget)
    prompts = load_prompts(args.prompts, args.limit)
    with locked(args.folder):
        return search(args, budget, prompts)


def search(args: argparse.Namespace, budget: Budget, prompts: Sequence[str]) -> int:
    tuner = Tuner(args, budget, prompts)
    try:
        lines = tuner.search()
    except KeyboardInterrupt:
        print(
            "\ninterrupted: continue with --resume; only the prompt under way is drawn again", file=sys.stderr
        )
        return 130
    scored = [line for line in lines if (line["method"], line["ratio"]) != REFERENCE]
    everybody = [lines[0], *ranked(scored, budget)]
    print(summary.table(everybody, {}))
    best = chosen(scored, budget, len(prompts) * args.seeds)
    print(*reasons(scored, budget, best), sep="\n")
    if best is None:
        return 1
    settings_file.save(args.output, tuner.config(best), tuner.notes(best, lines[0]))
    print(f"{args.output} is written: tomadiff.apply(pipe, {str(args.output)!r})")
    return 0


def check(args: argparse.Namespace, budget: Budget) -> None:
    if not budget:
        raise ValueError("say how close to the dense pictures it has to be: --psnr 35, or --ssim 0.95")
    if "psnr" in budget and not 0 < budget["psnr"] < scores.MAX_PSNR:
        raise ValueError(f"--psnr {budget['psnr']:g} must be above 0 and below {scores.MAX_PSNR:g}")
    if "ssim" in budget and not 0 < budget["ssim"] < 1:
        raise ValueError(f"--ssim {budget['ssim']:g} must be above 0 and below 1")
    args.folder = args.folder or folder_for("tuning", args.model)
    if args.output is None:
        args.output = args.folder / "settings.json"
    else:
        check_writable(args.output)
    check_counts(args)
    check_free(args.folder, args.resume)
    default_prompts(args)


def candidates(model: nn.Module, family: Family, placements: Sequence[Sequence[int]] = ()) -> list[Config]:
    """Settings that are worth trying, without those that a model can't honour.

    placements: lists of steps to run, beside those at equal distances.
    """
    wanted: list[dict[str, Any]] = [{"ratio": ratio} for ratio in (0.25, 0.5, 0.75, 0.9)]
    wanted += [{"interval": interval} for interval in (2, 3, 4, 5, 6)]
    wanted += [{"interval": steps} for steps in placements]
    wanted += [{"ratio": 0.25, "interval": interval} for interval in (2, 3)]
    wanted += [{"ratio": 0.75, "where": "kv", "weigh_keys": weigh} for weigh in (True, False)]
    anywhere = Config(where=min(family.offers)).resolve(family)
    levels = sorted({bound.level for bound in find(model, family, anywhere)})
    if len(levels) > 1:  # the finest level has the most tokens, and the most to gain
        wanted += [{"ratio": {levels[0]: 0.75}}]
        wanted += [{"ratio": {levels[0]: 0.75, **dict.fromkeys(levels[1:], 0.25)}}]
    found = []
    for fields in wanted:
        try:
            config = Config(**fields)
            find(model, family, config.resolve(family))
        except ConfigError:
            continue
        found.append(config)
    return found


class Tuner:
    """One search: its pipeline, its store of pictures, and its metrics."""

    def __init__(self, args: argparse.Namespace, budget: Budget, prompts: Sequence[str]) -> None:
        self.args, self.budget, self.prompts, self.seeds = args, budget, prompts, range(args.seeds)
        self.generator = ImageGenerator(job_of(args, [REFERENCE], None))
        check_prompts(self.generator.pipe, prompts)
        model = denoiser(self.generator.pipe)[0]
        self.family = family_of(model)
        found = candidates(model, self.family, self.placements(model))
        contenders, _ = pairs([written(config) for config in found], [], self.family)
        self.generator.job = job_of(args, [REFERENCE, *contenders], self.family)
        self.store = Store(args.folder, self.generator.job, args.resume)
        self.metrics = scores.load_metrics(scores.MetricOptions(["psnr", "ssim"], device=args.device))

    def placements(self, model: nn.Module) -> list[list[int]]:
        """Lists of steps to run. A search that is resumed draws for them again, and finds the same ones."""
        args, pipe = self.args, self.generator.pipe
        prompts = self.prompts[:: max(1, len(self.prompts) // CALIBRATION)][:CALIBRATION]
        print(f"{len(prompts)} dense pictures, to find out which steps should run", file=sys.stderr)
        size = tuple(args.size) if args.size else None
        # a seed that none of the scored pictures has
        requests = [Request(prompt, args.seeds, args.steps, size, args.guidance) for prompt in prompts]
        draws = [partial(draw, pipe, request) for request in requests]
        found = placements(model, pipe, draws, self.family.output_sign)
        if not found:
            print("no placement was found: steps run at equal distances", file=sys.stderr)
        return found

    def search(self) -> list[Row]:
        """The results of all settings, dense first; dropped ones have drawn only some prompts."""
        alive = list(self.store.job.contenders[1:])
        for stride in STRIDES:
            self.draw(alive, self.prompts[::stride])
            alive = best_half(self.lines(alive), self.budget) if stride > 1 else alive
        # a candidate that met the budget on some prompts is drawn on all, if a faster one failed there
        while True:
            lines = self.lines(self.store.job.contenders[1:])
            drawn = len(self.prompts) * len(self.seeds)
            hopeful = [line for line in ranked(lines[1:], self.budget) if meets(line, self.budget)]
            if not hopeful or hopeful[0]["pictures"] == drawn or chosen(lines[1:], self.budget, drawn):
                return lines
            self.draw([(hopeful[0]["method"], hopeful[0]["ratio"])], self.prompts)

    def draw(self, contenders: Sequence[Contender], prompts: Sequence[str]) -> None:
        """Draw what is missing. Times compare only within one process, so prompts are drawn as a whole."""
        print(f"{len(contenders)} settings, {len(prompts)} of {len(self.prompts)} prompts", file=sys.stderr)
        works: list[Work] = []
        for prompt, seed in [(prompt, seed) for seed in self.seeds for prompt in prompts]:
            there = {
                contender: self.store.rows.get((prompt, seed, *contender))
                for contender in self.store.job.contenders
            }
            processes = {contender: row and row["process"] for contender, row in there.items()}
            dense = processes[REFERENCE]
            todo = [
                contender
                for contender in (REFERENCE, *contenders)
                if processes[contender] is None or processes[contender] != dense
            ]
            if todo and dense != self.generator.process:
                todo = [
                    contender
                    for contender in there
                    if there[contender] or contender in (REFERENCE, *contenders)
                ]
            if todo:
                works.append(Work(prompt, seed, tuple(todo[::-1] if len(works) % 2 else todo)))
        draw_all(self.store, works, self.drawings(works))

    def drawings(self, works: Sequence[Work]) -> Iterator[Drawing]:
        return (self.generator.draw(work, contender) for work in works for contender in work.contenders)

    def lines(self, contenders: Sequence[Contender]) -> list[Row]:
        wanted = {REFERENCE, *contenders}
        asked = [
            row
            for row in self.store.asked(self.prompts, self.seeds)
            if (row["method"], row["ratio"]) in wanted
        ]
        rows, _ = scores.score(self.store, asked, self.metrics)
        for metric, why in self.metrics.unavailable.items():
            raise ValueError(f"pictures can't be scored by {summary.METRICS[metric][0]}: {why}")
        return summary.summarise(
            rows, [contender for contender in self.store.job.contenders if contender in wanted], {}
        )

    def config(self, line: Row) -> Config:
        return configuration(line["method"], line["ratio"], self.family)

    def notes(self, line: Row, dense: Row) -> dict[str, Any]:
        """Where the settings come from, for the file."""
        job = self.store.job.to_dict()
        about = {name: job[name] for name in job if name not in ("contenders", "settings")}
        about["processor"] = processor(self.args.device)
        figures = ("pictures", "seconds", "speedup", "psnr", "psnr_worst", "ssim", "ssim_worst")
        return {
            "from": "tomadiff tune",
            settings_file.MADE_FOR: type(denoiser(self.generator.pipe)[0]).__name__,
            "budget": self.budget,
            "measured": {name: line[name] for name in figures} | {"dense seconds": dense["seconds"]},
            **about,
        }


def meets(line: Row, budget: Budget) -> bool:
    """Whether a setting is close enough, and faster than dense."""
    return (line["speedup"] or 0) >= MIN_SPEEDUP and all(
        line[name] >= least for name, least in budget.items()
    )


def ranked(lines: Sequence[Row], budget: Budget) -> list[Row]:
    """First the settings that meet the budget, fastest first; then the others, closest first."""
    closest = next(iter(budget))
    return sorted(
        lines,
        key=lambda line: (1, line["speedup"]) if meets(line, budget) else (0, line[closest]),
        reverse=True,
    )


def best_half(lines: Sequence[Row], budget: Budget) -> list[Contender]:
    """The better half of the settings, and in any case the closest one that is faster than dense."""
    scored = ranked([line for line in lines if (line["method"], line["ratio"]) != REFERENCE], budget)
    gaining = [line for line in scored if (line["speedup"] or 0) >= MIN_SPEEDUP] or scored
    safest = max(gaining, key=lambda line: line[next(iter(budget))])
    kept = scored[: (len(scored) + 1) // 2]
    return [(line["method"], line["ratio"]) for line in (kept if safest in kept else [*kept, safest])]


def chosen(lines: Sequence[Row], budget: Budget, pictures: int) -> Row | None:
    """The fastest setting that meets the budget on all pictures."""
    return next((line for line in ranked(lines, budget) if _proven(line, budget, pictures)), None)


def _proven(line: Row, budget: Budget, pictures: int) -> bool:
    return line["pictures"] == pictures and meets(line, budget)


def reasons(lines: Sequence[Row], budget: Budget, best: Row | None) -> list[str]:
    """What was chosen and why, or why nothing was."""
    asked = " and ".join(f"{name.upper()} {least:g}" for name, least in budget.items())
    close = [line for line in lines if all(line[name] >= least for name, least in budget.items())]
    if best is None:
        if close:
            near = max(close, key=lambda line: line["speedup"] or 0)
            told = f"nothing that keeps {asked} is faster than dense here; the fastest is {_told(near)}"
        else:
            near = max(lines, key=lambda line: line[next(iter(budget))])
            told = f"nothing of {len(lines)} settings keeps {asked}; the closest is {_told(near)}"
        return [f"No settings are written: {told}."]
    said = [
        f"Chosen is {_told(best)}: of {len(lines)} settings, the fastest that keeps {asked} on "
        f"{best['pictures']} pictures."
    ]
    faster = [line for line in lines if (line["speedup"] or 0) > best["speedup"]]
    if untried := [line for line in faster if line in close]:
        near = max(untried, key=lambda line: line["speedup"])
        said.append(f"Faster, and as close, but on {near['pictures']} pictures only, is {_told(near)}.")
    faster = [line for line in faster if line not in close]
    if faster:
        near = max(faster, key=lambda line: line[next(iter(budget))])
        said.append(f"Faster, but not as close, is {_told(near)}.")
    return said


def _told(line: Row) -> str:
    speed = f"{line['speedup']:.2f}x" if line["speedup"] else "no time to compare"
    return (
        f"{label(line['method'], line['ratio'])} ({speed}, PSNR {line['psnr']:.3f} dB, "
        f"SSIM {line['ssim']:.4f}, worst tenth {line['psnr_worst']:.1f} dB)"
    )
