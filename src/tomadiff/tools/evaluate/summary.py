"""From rows and scores to a table, a quality-against-speed plot and a contact sheet."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from tomadiff.runtime.files import atomic_write
from tomadiff.tools.drawing import contact_sheet, markdown
from tomadiff.tools.method_spec import OURS, label, parse, parts_of

from .curves import curves
from .job import REFERENCE, Contender
from .scores import MAX_PSNR
from .store import Row, case_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FULL_RANK = 2048  # pictures that a full-rank covariance needs: as many as Inception has features
# name: (title, digits, higher is better)
METRICS: dict[str, tuple[str, int, bool]] = {
    "psnr": ("PSNR, dB", 1, True),
    "ssim": ("SSIM", 3, True),
    "lpips": ("LPIPS", 3, False),
    "dino": ("DINO", 3, False),
    "clip": ("CLIP-T", 3, True),
    "fid": ("FID", 1, False),
}


def summarise(
    rows: Sequence[Row], contenders: Sequence[Contender], sets: dict[str, dict[str, float]]
) -> list[Row]:
    """One row for each contender. `sets` has scores of whole sets of pictures, such as FID, by label."""
    dense = {case_of(row): row for row in rows if (row["method"], row["ratio"]) == REFERENCE}
    found = []
    for method, ratio in contenders:
        mine = [row for row in rows if (row["method"], row["ratio"]) == (method, ratio)]
        if not mine:
            continue
        line: Row = {"method": method, "ratio": ratio, "pictures": len(mine)}
        line["seconds"] = statistics.median(row["seconds"] for row in mine)
        pairs = [(dense[case_of(row)], row) for row in mine if case_of(row) in dense]
        line["identical"] = sum(d["sha256"] == row["sha256"] for d, row in pairs)
        # times compare only within one process: other machines, and other days, have other speeds
        speedups = [d["seconds"] / row["seconds"] for d, row in pairs if d["process"] == row["process"]]
        line["pairs"] = len(speedups)
        line["speedup"] = statistics.median(speedups) if speedups else None
        line["work"] = _work(mine, dense.values())
        for metric in METRICS:
            values = [row[metric] for row in mine if row.get(metric) is not None]
            # the dense picture can't be compared with itself, only with its prompt
            if values and ((method, ratio) != REFERENCE or metric == "clip"):
                line[metric] = statistics.fmean(values)
                line[f"{metric}_worst"] = worst_tenth(values, METRICS[metric][2])
        line |= sets.get(label(method, ratio), {})
        found.append(line)
    return found


def _work(mine: Sequence[Row], dense: Iterable[Row]) -> float | None:
    """The share of the dense denoiser's FLOPs; all dense pictures of a job take the same."""
    counted = [row["flops"] for row in mine if row.get("flops") is not None]
    whole = [row["flops"] for row in dense if row.get("flops")]
    return statistics.fmean(counted) / whole[0] if counted and whole else None


def worst_tenth(values: Sequence[float], higher_is_better: bool) -> float:
    """The mean of the worst tenth, at least of one."""
    ordered = sorted(values, reverse=not higher_is_better)
    return statistics.fmean(ordered[: max(1, len(ordered) // 10)])


def table(lines: Sequence[Row], unavailable: dict[str, str]) -> str:
    """The summary as Markdown, with notes below it, also on metrics that were not available, and why."""
    shown = [metric for metric in METRICS if metric in unavailable or any(metric in line for line in lines)]
    columns = {
        "setting": [line["method"] for line in lines],
        "ratio": [f"{line['ratio']:g}" if line["ratio"] else "-" for line in lines],
        "pictures": [str(line["pictures"]) for line in lines],
        "s / image": [f"{line['seconds']:.3g}" for line in lines],
        "speed-up": [f"{line['speedup']:.2f}x" if line["speedup"] else "-" for line in lines],
        "pairs": [str(line["pairs"] or "-") for line in lines],
    }
    if any(line.get("work") for line in lines):
        columns["work"] = [f"{line['work']:.3f}" if line.get("work") else "-" for line in lines]
    for metric in shown:
        title = METRICS[metric][0] + (" (worst tenth)" if metric == "psnr" else "")
        columns[title] = [_cell(line, metric, unavailable) for line in lines]
    return "\n\n".join([markdown(columns), *_notes(lines, unavailable)])


def write_csv(lines: Sequence[Row], path: Path) -> None:
    """One row for each contender."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for line in lines for name in line))
        writer.writeheader()
        writer.writerows(lines)


def _notes(lines: Sequence[Row], unavailable: dict[str, str]) -> Iterator[str]:
    for metric, how in unavailable.items():
        yield f"{METRICS[metric][0]} is not available: {how}"
    if any(line.get("work") for line in lines):
        yield "Work is the counted share of the FLOPs that the dense model takes for a whole generation."
    if any(line["pairs"] < line["pictures"] for line in lines):
        yield (
            "A speed-up rests on pairs of a dense picture and another that one worker drew in one session. "
            "There are fewer than pictures where an evaluation was resumed, or a worker died."
        )
    same = [line for line in lines if "psnr" in line and line["identical"]]
    if same:
        which = ", ".join(f"{line['identical']} of {label(line['method'], line['ratio'])}" for line in same)
        yield f"PSNR counts as {MAX_PSNR:g} dB at most, in means too; bit-identical to dense are {which}."
    few = min((line["pictures"] for line in lines if "fid" in line), default=FULL_RANK)
    if few < FULL_RANK:
        yield (
            f"FID of fewer than {FULL_RANK} pictures (here {few}) has a rank-deficient covariance and is "
            "biased upward: compare it only within this table."
        )


def _cell(line: Row, metric: str, unavailable: dict[str, str]) -> str:
    if metric in unavailable:
        return "not available"
    _, digits, _ = METRICS[metric]
    if line.get(metric) is None:
        return "-"
    if metric == "psnr" and _is_equal(line):
        return "equal"
    worst = line.get(f"{metric}_worst")
    return f"{line[metric]:.{digits}f}" + (f" ({worst:.{digits}f})" if metric == "psnr" else "")


def _is_equal(line: Row) -> bool:
    """Whether all pictures are the dense ones, to the bit."""
    return "identical" in line and line["identical"] == line["pictures"]


def _is_ours(method: str) -> bool:
    return any(parse(part)[0] == OURS for part in parts_of(method))


def pareto_plot(lines: Sequence[Row], metric: str, title: str, path: Path) -> None:
    """Plot quality against counted work, where it is known, and against speed, with the Pareto front.

    Contenders that differ only in a number are points of one curve. Dense is a vertical line, since its PSNR
    is infinite. The Pareto front has only contenders that are cheaper than dense.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'tomadiff[eval]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["text.parse_math"] = False  # a prompt with dollars is no formula
    points = [line for line in lines if line.get(metric) is not None and not _is_equal(line)]
    titles = {"work": "share of the model's work (FLOPs)", "speedup": "speed-up over dense"}
    shown = [axis for axis in titles if any(line.get(axis) for line in points)]
    panels = len(shown) or 1
    figure, axes = pyplot.subplots(
        1, panels, figsize=(1 + 5 * panels, 4.6), dpi=110, sharey=True, squeeze=False
    )
    curve_of = curves([(line["method"], line["ratio"]) for line in points])
    for name, axis in zip(shown, axes[0]):
        _panel(axis, [line for line in points if line.get(name)], name, metric, curve_of)
        axis.set_xlabel(titles[name])
    axes[0][0].set_ylabel(METRICS[metric][0])
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    named: dict[str, Any] = {}
    for axis in axes[0]:
        named |= dict(zip(*reversed(axis.get_legend_handles_labels())))
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "ncol": 2, "frameon": False, "fontsize": 8}
    figure.legend(named.values(), named.keys(), **below)
    atomic_write(path, lambda partial: figure.savefig(partial, format="png", bbox_inches="tight"))
    pyplot.close(figure)


def _panel(axis: Axes, points: Sequence[Row], name: str, metric: str, curve_of: dict[Contender, str]) -> None:
    for number, curve in enumerate(dict.fromkeys(curve_of.values())):
        mine = [line for line in points if curve_of[line["method"], line["ratio"]] == curve]
        if not mine:
            continue
        xy = sorted((line[name], line[metric]) for line in mine)
        ours = any(_is_ours(line["method"]) for line in mine)
        style: dict[str, Any] = {"color": f"C{number % 10}", "marker": "os^Dv"[number // 10 % 5]}
        axis.plot(*zip(*xy), **style, linewidth=2.2 if ours else 1.3, label=curve)
    axis.axvline(1, color="grey", linewidth=1, label="dense", zorder=0)
    # less work is better, so its inverse takes the place of speed
    speeds = [(1 / line[name] if name == "work" else line[name], line[metric]) for line in points]
    front = pareto([point for point in speeds if point[0] > 1], METRICS[metric][2])
    if len(front) > 1:
        xy = [(1 / speed if name == "work" else speed, quality) for speed, quality in front]
        axis.plot(*zip(*xy), color="black", linestyle=":", linewidth=1, label="front", zorder=0)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def pareto(points: Sequence[tuple[float, float]], higher_is_better: bool) -> list[tuple[float, float]]:
    """The points that no other beats in both, from the slowest to the fastest."""
    sign = 1 if higher_is_better else -1
    front: list[tuple[float, float]] = []
    for speed, quality in sorted(points, key=lambda point: (-point[0], -sign * point[1])):
        if not front or sign * quality > sign * front[-1][1]:
            front.append((speed, quality))
    return front[::-1]


def cases(
    rows: Sequence[Row], contenders: Sequence[Contender], read: Any, metric: str = "psnr", side: int = 128
) -> Image.Image | None:
    """A contact sheet with a row for each contender; columns are a best, a median and a worst case.

    They are chosen by the first contender of our own, or else the first that is not dense. None if no prompt
    has been drawn by all contenders yet.
    """
    shown = [REFERENCE, *(contender for contender in contenders if contender != REFERENCE)]
    drawn = [
        {case_of(row) for row in rows if (row["method"], row["ratio"]) == contender} for contender in shown
    ]
    common = set.intersection(*drawn)
    ours = [contender for contender in shown if _is_ours(contender[0])]
    sorted_by = ours[0] if ours else shown[1]
    ranked = sorted(
        (row for row in rows if (row["method"], row["ratio"]) == sorted_by and case_of(row) in common),
        key=lambda row: row[metric],
        reverse=METRICS[metric][2],
    )
    if not ranked:
        return None
    chosen = {"best": ranked[0], "median": ranked[len(ranked) // 2], "worst": ranked[-1]}
    title, digits, _ = METRICS[metric]
    unit = title.partition(", ")[2]
    pictures, captions = [], []
    for case in chosen.values():
        dense, *others = (_same(rows, case, contender) for contender in shown)
        pictures.append([_thumbnail(read(row), side) for row in (dense, *others)])
        captions.append([case["prompt"], *(f"{row[metric]:.{digits}f} {unit}".strip() for row in others)])
    by_contender, said = [list(row) for row in zip(*pictures)], [list(row) for row in zip(*captions)]
    name = label(*sorted_by)
    whose = name if len(name) <= 30 else f"{name[:30]}..."  # columns should not get wider than pictures need
    titles = [f"{which} for {whose}" for which in chosen]
    return contact_sheet(by_contender, titles, [label(*contender) for contender in shown], said)


def _same(rows: Sequence[Row], case: Row, contender: Contender) -> Row:
    wanted = (*case_of(case), *contender)
    return next(row for row in rows if (*case_of(row), row["method"], row["ratio"]) == wanted)


def _thumbnail(picture: Image.Image, side: int) -> Image.Image:
    scale = side / max(picture.size)
    return picture.resize(
        (round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS
    )
