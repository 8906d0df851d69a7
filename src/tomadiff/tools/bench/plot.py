"""Plot the figures: speed-up against ratio, and time against size."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomadiff.runtime.files import atomic_write
from tomadiff.tools.method_spec import DENSE, OURS

from .figures import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IDEAL_COLOUR, OUR_COLOUR, DENSE_COLOUR = "#888888", "#d6336c", "#222222"
COLOURS = ("#1c7ed6", "#f08c00", "#2f9e44", "#7048e8", "#0c8599", "#a61e4d", "#5c940d", "#862e9c")


def check_plot(path: Path, methods: Sequence[str] | None) -> None:
    """Raise before hours of measuring if the plot can't be drawn."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--plot {path}: what is drawn is a PNG; name it so")
    if find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install 'tomadiff[bench]'")
    if methods and (DENSE not in methods or len(methods) == 1):
        raise ValueError(
            f"--plot draws speed-ups over {DENSE}: add it to --methods, and something to compare"
        )


def plot(figures: Sequence[Row], title: str, path: Path) -> None:
    """Plot speed-up against ratio, one panel per size, and time against size if there are several sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["text.parse_math"] = False  # dollar signs in a model's name are not formulas
    sizes = sorted({row["size"] for row in figures}, key=lambda size: size[0] * size[1])
    panels = len(sizes) + (len(sizes) > 1)
    figure, axes = pyplot.subplots(1, panels, figsize=(1.5 + 4.6 * panels, 4.6), squeeze=False, dpi=110)
    colours = _colours(figures)
    for size, axis in zip(sizes, axes[0]):
        _against_ratio(axis, [row for row in figures if row["size"] == size], colours)
        axis.set_title(f"{size[0]} x {size[1]}", fontsize=10)
    if len(sizes) > 1:
        _against_size(axes[0][-1], figures, colours)
    handles: dict[str, Any] = {}
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels())))
    figure.suptitle(title, fontsize=11)
    beside = {"loc": "upper left", "bbox_to_anchor": (1.02, 1), "frameon": False}
    axes[0][-1].legend(handles.values(), handles.keys(), **beside)
    figure.tight_layout()
    atomic_write(path, lambda partial: figure.savefig(partial, format="png"))
    pyplot.close(figure)


def _colours(figures: Sequence[Row]) -> dict[str, str]:
    own = {DENSE: DENSE_COLOUR, "ideal": IDEAL_COLOUR, OURS: OUR_COLOUR}
    others = [method for method in dict.fromkeys(row["method"] for row in figures) if method not in own]
    return own | {method: COLOURS[i % len(COLOURS)] for i, method in enumerate(others)}


def _style(method: str) -> dict[str, Any]:
    return {
        "linestyle": "--" if method == "ideal" else "-",
        "linewidth": 2.4 if method == OURS else 1.4,
        "marker": None if method == "ideal" else "o",
        "zorder": 3 if method == OURS else 2,
    }


def _against_ratio(axis: Axes, figures: Sequence[Row], colours: dict[str, str]) -> None:
    for method in dict.fromkeys(row["method"] for row in figures if row["method"] != DENSE):
        mine = [row for row in figures if row["method"] == method]
        points = sorted((row["ratio"], row["speedup"], row["speedup_spread"]) for row in mine)
        ratios, speedups, spreads = zip(*points)
        axis.plot(ratios, speedups, label=method, color=colours[method], **_style(method))
        lowest, highest = zip(*spreads)
        axis.fill_between(ratios, lowest, highest, color=colours[method], alpha=0.12, linewidth=0)
    medians = [1.0, *(row["speedup"] for row in figures)]
    axis.set_ylim(min(medians) - 0.1, max(medians) * 1.08)
    axis.axhline(1, color=DENSE_COLOUR, linewidth=0.8)
    axis.set_xticks(sorted({row["ratio"] for row in figures if row["ratio"]}))
    axis.set_xlabel("ratio: share of tokens removed")
    axis.set_ylabel("speed-up over dense")


def _against_size(axis: Axes, figures: Sequence[Row], colours: dict[str, str]) -> None:
    """Plot time against size, at the middle one of the ratios and for methods without a ratio."""
    ratios = sorted({row["ratio"] for row in figures if row["ratio"]}) or [0]
    middle = ratios[(len(ratios) - 1) // 2]
    shown = [row for row in figures if row["ratio"] in (0, middle)]
    for method in dict.fromkeys(row["method"] for row in shown):
        mine = [row for row in shown if row["method"] == method]
        points = sorted((row["size"][0] * row["size"][1] / 1e6, row["seconds"]) for row in mine)
        axis.plot(*zip(*points), label=method, color=colours[method], **_style(method))
    axis.set_title(f"ratio {middle:g}" if middle else "", fontsize=10)
    axis.set_xlabel("megapixels")
    axis.set_ylabel("seconds")
    axis.set_ylim(bottom=0)
