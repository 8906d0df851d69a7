"""Results as the page shows them: figures, contact sheets, plots and text."""

from __future__ import annotations

import html
import math
from collections import Counter, deque
from pathlib import Path

from PIL import Image

from tomadiff.tools.drawing import contact_sheet
from tomadiff.tools.evaluate.scores import MAX_PSNR
from tomadiff.tools.evaluate.summary import pareto_plot
from tomadiff.tools.generate import Request, save
from tomadiff.tools.merge_map import MergeMap
from tomadiff.tools.method_spec import label

from .results import Comparison, Drawn, Merged, Sweep

EXPORTS = "exports"  # where they go in the page's folder
MAX_EXPORTS = 64  # files; older ones are deleted


def enlarged(picture: Image.Image, side: int = 512) -> Image.Image:
    """A small picture enlarged by a whole factor, without smoothing."""
    factor = max(1, side // max(picture.size))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def message(text: str, kind: str = "note") -> str:
    """A message, with its role for screen readers, which read errors at once."""
    role = "alert" if kind == "mistake" else "status"
    return f'<div class="message {kind}" role="{role}">{html.escape(text)}</div>'


def figures(result: Comparison | None) -> str:
    """The numbers of a comparison as cards."""
    if result is None:
        cards = [(name, "-", "") for name in ("Speed-up", "Dense", "Merged", "Tokens kept", "PSNR", "SSIM")]
    else:
        merged = result.merged
        cards = [
            ("Speed-up", f"{result.speedup:.2f}x", "over dense"),
            ("Dense", seconds(result.dense), "from before" if result.dense_was_kept else "all tokens"),
            ("Merged", seconds(merged), f"in {merged.merged_steps} of {merged.steps} steps"),
            ("Tokens kept", f"{merged.kept}", f"of {merged.tokens}"),
            ("PSNR", decibels(merged), "to dense"),
            ("SSIM", f"{merged.ssim:.3f}", "1 is the same"),
        ]
    return '<dl class="figures">' + "".join(_card(*card) for card in cards) + "</dl>"


def _card(name: str, value: str, note: str) -> str:
    return f"<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>"


def seconds(drawn: Drawn) -> str:
    return f"{drawn.seconds:.2f} s"


def decibels(merged: Merged) -> str:
    return "same" if math.isinf(merged.psnr) else f"{merged.psnr:.1f} dB"


def about_map(mapped: MergeMap, steps: int, token: int | None) -> str:
    """A merge map in words, and where one token went."""
    sizes = Counter(mapped.owners.tolist())
    lines = [
        f"**Step {mapped.step + 1} of {steps}.** {len(mapped.owners)} tokens on a grid of "
        f"{mapped.grid[0]} x {mapped.grid[1]} went to {len(mapped.destinations)} destinations.",
        f"The largest group has {max(sizes.values())} tokens; "
        f"{sum(size == 1 for size in sizes.values())} tokens are alone.",
    ]
    if token is None:
        lines.append("Click a token, or give its row and column, to see where it went.")
    else:
        owner = mapped.owners[token].item()
        others = sizes[owner] - 1
        company = f"{others} other{'s' if others != 1 else ''}" if others else "no other"
        if owner == token:
            where = f"is a destination, to which {company} went."
        else:
            where = f"went to {_place(owner, mapped)}; that group has {others + 1} tokens."
        lines.append(f"**The token at {_place(token, mapped)}** {where}")
    return "\n\n".join(lines)


def _place(token: int, mapped: MergeMap) -> str:
    return f"row {token // mapped.grid[1] + 1}, column {token % mapped.grid[1] + 1}"


def sheet(result: Sweep) -> Image.Image:
    """Methods by ratios, with time and fidelity under each; the dense picture in front."""
    methods = list(dict.fromkeys(method for method, _ in result.cells))
    ratios = sorted({ratio for _, ratio in result.cells})
    first = _thumbnail(result.dense.picture)
    empty = Image.new("RGB", first.size, "white")
    rows, captions = [], []
    for number, method in enumerate(methods):
        cells = [result.cells.get((method, ratio)) for ratio in ratios]
        rows.append([empty if number else first, *(_thumbnail(c.picture) if c else empty for c in cells)])
        said = [f"{seconds(c)}, {decibels(c)}" if c else "" for c in cells]
        captions.append(["" if number else seconds(result.dense), *said])
    return contact_sheet(rows, ["dense", *(f"ratio {ratio:g}" for ratio in ratios)], methods, captions)


def _thumbnail(picture: Image.Image, side: int = 144) -> Image.Image:
    picture = enlarged(picture.convert("RGB"), side)
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    return picture


def plot(result: Sweep, title: str, path: Path) -> None:
    lines = [
        {
            "method": method,
            "ratio": ratio,
            "speedup": result.dense.seconds / cell.seconds,
            "psnr": min(MAX_PSNR, cell.psnr),
        }
        for (method, ratio), cell in result.cells.items()
    ]
    pareto_plot(lines, "psnr", title, path)


def title(request: Request, model: str) -> str:
    return f"{model}: {request.prompt}, seed {request.seed}, {request.steps} steps"


class Exports:
    """Files for download; only the newest are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: deque[Path] = deque()
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """The path of a new file; its name never comes from the page."""
        path = self.folder / name
        if path not in self._made:
            self._made.append(path)
        while len(self._made) > MAX_EXPORTS:
            self._made.popleft().unlink(missing_ok=True)
        return path

    def sheet(self, name: str, result: Sweep, model: str) -> Path:
        path = self.path(f"sweep-{name}.png")
        about = {
            "model": model,
            "prompt": result.generation.request.prompt,
            "seed": result.generation.request.seed,
            "steps": result.generation.request.steps,
            "cells": {label(*cell): merged.settings for cell, merged in result.cells.items()},
        }
        save(sheet(result), path, about)
        return path
