"""`tomadiff tune`: the fastest settings that keep pictures as close to the dense ones as is asked for.

A small set of settings draws a few prompts; the better half goes on to more of them, and so on. All that is
drawn and timed is kept by the evaluation's store, so that it can be interrupted, and is judged by its scores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from tomadiff import settings_file
from tomadiff.config import Config, make
from tomadiff.errors import ConfigError
from tomadiff.models import Family, family_of
from tomadiff.runtime.files import check_writable, locked
from tomadiff.runtime.machine import processor
from tomadiff.runtime.registration import denoiser
from tomadiff.runtime.sites import find

from .evaluate import scores, summary
from .evaluate.command import check_counts, default_prompts, draw_all, job_of
from .evaluate.job import REFERENCE, Drawing, Painter, Way, Work
from .evaluate.prompts import check_prompts, load_prompts
from .evaluate.store import Row, Store, check_free, folder_for
from .generate import Request, draw
from .method_spec import configuration, label, pairs, written
from .step_placement import placements

BUDGETS = ("psnr", "ssim")
STRIDES = (4, 2, 1)  # a quarter of the prompts, half of them, all
CALIBRATION = 2  # dense pictures that tell where the steps that run should be
WORTH = 1.02  # a speed-up that can be told from noise
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
        print("\ninterrupted: --resume goes on; only the prompt under way is drawn again", file=sys.stderr)
        return 130
    judged = [line for line in lines if (line["way"], line["ratio"]) != REFERENCE]
    everybody = [lines[0], *ranked(judged, budget)]
    print(summary.table(everybody, {}))
    best = chosen(judged, budget, len(prompts) * args.seeds)
    print(*reasons(judged, budget, best), sep="\n")
    if best is None:
        return 1
    settings_file.save(args.output, tuner.config(best), tuner.notes(best, lines[0]))
    print(f"{args.output} is written: tomadiff.apply(pipe, {str(args.output)!r})")
    return 0


def check(args: argparse.Namespace, budget: Budget) -> None:
    if not budget:
        raise ValueError("say how close to the dense pictures it has to be: --psnr 35, or --ssim 0.95")
    if "psnr" in budget and not 0 < budget["psnr"] < scores.PSNR_MOST:
        raise ValueError(f"--psnr {budget['psnr']:g} must be above 0 and below {scores.PSNR_MOST:g}")
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
    """Settings that are worth a try, as far as a model can honour them.

    placements: lists of steps to run, beside those at equal distances.
    """
    wanted: list[dict[str, Any]] = [{"ratio": ratio} for ratio in (0.25, 0.5, 0.75, 0.9)]
    wanted += [{"interval": interval} for interval in (2, 3, 4, 5, 6)]
    wanted += [{"interval": steps} for steps in placements]
    wanted += [{"ratio": 0.25, "interval": interval} for interval in (2, 3)]
    wanted += [{"ratio": 0.75, "where": "kv", "weigh_keys": weigh} for weigh in (True, False)]
    levels = sorted({place.level for place in find(model, family, Config(where=min(family.offers)))})
    if len(levels) > 1:  # the finest has most to spare
        wanted += [{"ratio": {levels[0]: 0.75}}]
        wanted += [{"ratio": {levels[0]: 0.75, **dict.fromkeys(levels[1:], 0.25)}}]
    found = []
    for fields in wanted:
        try:
            config = make(None, None, fields, offers=family.offers)
            find(model, family, config)
        except ConfigError:
            continue
        found.append(config)
    return found


class Tuner:
    """One search: what is drawn, by whom, and what is known of it."""

    def __init__(self, args: argparse.Namespace, budget: Budget, prompts: Sequence[str]) -> None:
        self.args, self.budget, self.prompts, self.seeds = args, budget, prompts, range(args.seeds)
        self.painter = Painter(job_of(args, [REFERENCE], None))
        check_prompts(self.painter.pipe, prompts)
        model = denoiser(self.painter.pipe)[0]
        self.family = family_of(model)
        found = candidates(model, self.family, self.placements(model))
        ways, _ = pairs([written(config) for config in found], [], self.family)
        self.painter.job = job_of(args, [REFERENCE, *ways], self.family)
        self.store = Store(args.folder, self.painter.job, args.resume)
        self.judges = scores.judges_of(scores.Wanted(["psnr", "ssim"], device=args.device))

    def placements(self, model: nn.Module) -> list[list[int]]:
        """Lists of steps to run. A search that is resumed draws for them again, and finds the same ones."""
        args, pipe = self.args, self.painter.pipe
        prompts = self.prompts[:: max(1, len(self.prompts) // CALIBRATION)][:CALIBRATION]
        print(f"{len(prompts)} dense pictures tell which steps should run", file=sys.stderr)
        size = tuple(args.size) if args.size else None
        # with a seed that none of the pictures has that it is judged by
        requests = [Request(prompt, args.seeds, args.steps, size, args.guidance) for prompt in prompts]
        found = placements(model, pipe.scheduler, [partial(draw, pipe, request) for request in requests])
        if not found:
            print("which could not be told here: they run at equal distances", file=sys.stderr)
        return found

    def search(self) -> list[Row]:
        """What is known of every setting in the end, dense first: not all of them drew all prompts."""
        alive = list(self.store.job.ways[1:])
        for stride in STRIDES:
            self.draw(alive, self.prompts[::stride])
            alive = best_half(self.lines(alive), self.budget) if stride > 1 else alive
        # what met the budget on fewer prompts than all may have to take the place of what failed it later
        while True:
            lines = self.lines(self.store.job.ways[1:])
            drawn = len(self.prompts) * len(self.seeds)
            hopeful = [line for line in ranked(lines[1:], self.budget) if meets(line, self.budget)]
            if not hopeful or hopeful[0]["pictures"] == drawn or chosen(lines[1:], self.budget, drawn):
                return lines
            self.draw([(hopeful[0]["way"], hopeful[0]["ratio"])], self.prompts)

    def draw(self, ways: Sequence[Way], prompts: Sequence[str]) -> None:
        """Draw what is missing. Times compare within a session only, so half a prompt is drawn again."""
        print(f"{len(ways)} settings, {len(prompts)} of {len(self.prompts)} prompts", file=sys.stderr)
        works: list[Work] = []
        for prompt, seed in [(prompt, seed) for seed in self.seeds for prompt in prompts]:
            there = {way: self.store.rows.get((prompt, seed, *way)) for way in self.store.job.ways}
            painters = {way: row and row["painter"] for way, row in there.items()}
            dense = painters[REFERENCE]
            todo = [way for way in (REFERENCE, *ways) if painters[way] is None or painters[way] != dense]
            if todo and dense != self.painter.name:
                todo = [way for way in there if there[way] or way in (REFERENCE, *ways)]
            if todo:
                works.append(Work(prompt, seed, tuple(todo[::-1] if len(works) % 2 else todo)))
        draw_all(self.store, works, self.drawings(works))

    def drawings(self, works: Sequence[Work]) -> Iterator[Drawing]:
        return (self.painter.draw(work, way) for work in works for way in work.ways)

    def lines(self, ways: Sequence[Way]) -> list[Row]:
        wanted = {REFERENCE, *ways}
        asked = [
            row for row in self.store.asked(self.prompts, self.seeds) if (row["way"], row["ratio"]) in wanted
        ]
        rows, _ = scores.score(self.store, asked, self.judges)
        for metric, why in self.judges.unavailable.items():
            raise ValueError(f"pictures can't be judged by {summary.METRICS[metric][0]}: {why}")
        return summary.summarise(rows, [way for way in self.store.job.ways if way in wanted], {})

    def config(self, line: Row) -> Config:
        return configuration(line["way"], line["ratio"], self.family)

    def notes(self, line: Row, dense: Row) -> dict[str, Any]:
        """Where the settings come from, for the file."""
        job = self.store.job.to_dict()
        about = {name: job[name] for name in job if name not in ("ways", "settings")}
        about["processor"] = processor(self.args.device)
        figures = ("pictures", "seconds", "speedup", "psnr", "psnr_worst", "ssim", "ssim_worst")
        return {
            "from": "tomadiff tune",
            settings_file.MADE_FOR: type(denoiser(self.painter.pipe)[0]).__name__,
            "budget": self.budget,
            "measured": {name: line[name] for name in figures} | {"dense seconds": dense["seconds"]},
            **about,
        }


def meets(line: Row, budget: Budget) -> bool:
    """Whether a setting is close enough, and faster than dense."""
    return (line["speedup"] or 0) >= WORTH and all(line[name] >= least for name, least in budget.items())


def ranked(lines: Sequence[Row], budget: Budget) -> list[Row]:
    """Those that meet the budget first, the fastest of them first; then the closest."""
    closest = next(iter(budget))
    return sorted(
        lines,
        key=lambda line: (1, line["speedup"]) if meets(line, budget) else (0, line[closest]),
        reverse=True,
    )


def best_half(lines: Sequence[Row], budget: Budget) -> list[Way]:
    """The better half of the settings, and the closest of those that gain, to be on the safe side."""
    judged = ranked([line for line in lines if (line["way"], line["ratio"]) != REFERENCE], budget)
    gaining = [line for line in judged if (line["speedup"] or 0) >= WORTH] or judged
    safest = max(gaining, key=lambda line: line[next(iter(budget))])
    kept = judged[: (len(judged) + 1) // 2]
    return [(line["way"], line["ratio"]) for line in (kept if safest in kept else [*kept, safest])]


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
        f"{label(line['way'], line['ratio'])} ({speed}, PSNR {line['psnr']:.3f} dB, SSIM {line['ssim']:.4f}, "
        f"worst tenth {line['psnr_worst']:.1f} dB)"
    )
