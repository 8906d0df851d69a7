"""Turn runs into figures: medians of ratios within rounds, as rows, as a table and in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tomadiff.tools.drawing import markdown
from tomadiff.tools.method_spec import DENSE, OURS, parse

from .measure import Run

Row = dict[str, Any]
WORTH = 0.05  # the least saving that is worth a changed image
MIN_SAVING = 0.02  # smaller savings can't be told from noise


def rows(runs: Sequence[Run], counts: Sequence[Row], keep_steps: dict[str, float]) -> list[Row]:
    """One row per size, method and ratio.

    keep_steps: for how many steps each method reuses a plan. The planning time is spread over these steps; a
    refresh of the weights alone is charged like a whole plan.
    """
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault((run.size, run.method, run.ratio), []).append(run)
    counted = {(tuple(row["size"]), row["method"], row["ratio"]): row for row in counts}
    return [
        _row(group, key, runs, keep_steps) | {k: v for k, v in counted.get(key, {}).items() if k not in KEY}
        for key, group in groups.items()
    ]


KEY = ("size", "method", "ratio")


def _row(group: list[Run], key: tuple, runs: Sequence[Run], keep_steps: dict[str, float]) -> Row:
    size, method, ratio = key
    times = {run.round: _seconds(run, keep_steps) for run in group}
    row: Row = {"size": size, "method": method, "ratio": ratio, "rounds": len(times)}
    row["seconds"] = statistics.median(times.values())
    for part in ("plan", "merge", "unmerge"):
        known = [getattr(run, f"{part}_seconds") for run in group]
        row[f"{part}_seconds"] = None if None in known else statistics.median(known)
    row["keep_steps"] = keep_steps.get(method, 1)
    if all(run.level_bytes for run in group):
        row["working_gb"] = max(run.peak_bytes - run.level_bytes for run in group) / 1e9
    row["peak_gb"] = max(run.peak_bytes for run in group) / 1e9
    dense = {run.round: run.seconds for run in runs if run.size == size and run.method == DENSE}
    limit = ideal_of(method)
    ideal = {
        run.round: _seconds(run, keep_steps)
        for run in runs
        if (run.size, run.method, run.ratio) == (size, limit, ratio)
    }
    if dense:
        ratios = [dense[number] / seconds for number, seconds in times.items()]
        row["speedup"], row["speedup_spread"] = statistics.median(ratios), _middle_half(ratios)
    if dense and ideal:
        possible = {number: 1 - ideal[number] / dense[number] for number in times}
        row["of_ideal"] = None  # the ideal saves next to nothing, so a share of it would mean nothing
        if statistics.median(possible.values()) >= MIN_SAVING:
            # leave out rounds in which the ideal was disturbed: a share of its saving could be anything there
            row["of_ideal"] = statistics.median(
                (1 - seconds / dense[number]) / possible[number]
                for number, seconds in times.items()
                if possible[number] >= MIN_SAVING
            )
    return row


def ideal_of(method: str) -> str:
    """The name of a method's upper bound: the ideal on the same sites."""
    if "+" in method:
        return ""
    sites = {"where", "modules", "dense_blocks"} & set(parse(method)[1])
    same = [
        f"{name}={parse(method)[1][name]}" for name in ("where", "modules", "dense_blocks") if name in sites
    ]
    return f"ideal:{','.join(same)}" if same else "ideal"


def _middle_half(values: list[float]) -> tuple[float, float]:
    """The lower and upper quartile, which a single disturbed run hardly affects."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _seconds(run: Run, keep_steps: dict[str, float]) -> float:
    kept = keep_steps.get(run.method, 1)
    return run.seconds if kept == 1 else run.seconds + (run.plan_seconds or 0.0) / kept


def table(figures: Sequence[Row], unit: str) -> str:
    """The figures as a Markdown table, without columns that have no values."""
    most = max((row.get("model_flops") or 0.0 for row in figures), default=0.0)
    unit_name, scale = ("T", 1e12) if most >= 1e11 else ("G", 1e9)
    columns = {
        "size": [f"{row['size'][0]} x {row['size'][1]}" for row in figures],
        "method": [row["method"] for row in figures],
        "ratio": [f"{row['ratio']:g}" if row["ratio"] else "-" for row in figures],
        f"s / {unit}": [_seconds_text(row["seconds"]) for row in figures],
        "speed-up (middle half)": [_speedup(row) for row in figures],
        "work": [_number(row.get("work"), 1, 3) for row in figures],
        "expected": [
            f"{row['expected_speedup']:.2f}x" if row.get("expected_speedup") else "-" for row in figures
        ],
        "of the ideal saving": [_percent(row.get("of_ideal")) for row in figures],
        "plan / merge / unmerge, ms": [_parts(row) for row in figures],
        f"{unit_name}FLOP a call": [_number(row.get("model_flops"), scale, 2) for row in figures],
        "overhead FLOPs": [_percent(row.get("overhead_flops_share"), 2) for row in figures],
        "launches added a call": [_number(row.get("launches_added"), 1, 0) for row in figures],
        "working memory, GB": [_number(row.get("working_gb"), 1, 2) for row in figures],
    }
    return markdown({name: cells for name, cells in columns.items() if set(cells) != {"-"}})


def _speedup(row: Row) -> str:
    if "speedup" not in row or row["method"] == DENSE:
        return "-"
    low, high = row["speedup_spread"]
    return f"{row['speedup']:.2f}x ({low:.2f}-{high:.2f})"


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3g}"


def _percent(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def _number(value: float | None, unit: float, digits: int) -> str:
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def _parts(row: Row) -> str:
    parts = [row[f"{part}_seconds"] for part in ("plan", "merge", "unmerge")]
    if None in parts or row["method"] == "ideal":
        return "-"
    kept = f" every {row['keep_steps']:g} steps" if row["keep_steps"] > 1 else ""
    plan, merge, unmerge = (f"{1000 * part:.0f}" for part in parts)
    return f"{plan}{kept} / {merge} / {unmerge}"


def words(figures: Sequence[Row]) -> list[str]:
    """One sentence per size and ratio: whether our own merging is worth it."""
    sentences = []
    for row in figures:
        if not row["method"].startswith(OURS) or "speedup" not in row:
            continue
        saving = 1 - 1 / row["speedup"]
        (height, width), ratio = row["size"], row["ratio"]
        setting = row["method"].removeprefix(OURS).removeprefix(":")
        verdict = "worth it" if saving >= WORTH else "not worth it"
        if row["rounds"] == 1:
            verdict = "one round is not enough to tell whether that is so, take more --repeats"
        does = f"saves {saving:.0%}" if saving >= 0 else f"costs {-saving:.0%}"
        sentences.append(
            f"at {height} x {width} on this device merging{f' at {ratio:g}' if ratio else ''}"
            f"{f' with {setting}' if setting else ''} {does}: {verdict}"
        )
    return sentences
