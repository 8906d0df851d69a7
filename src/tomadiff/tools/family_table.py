"""The table of families, for the terminal and for the documentation."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap

from tomadiff.models import FAMILIES, Family
from tomadiff.models.unsupported import REFUSED

HEADER = ("family", "covers", "model classes", "sites", "rotary", "grid", "tested with")


def run(args: argparse.Namespace) -> None:
    """`tomadiff families`."""
    if args.refused:
        print(refused(args.markdown))
    elif args.markdown:
        print(markdown())
    elif sys.stdout.isatty():
        print(narrow(shutil.get_terminal_size().columns))
    else:
        print(text())


def row(family: Family) -> tuple[str, ...]:
    return (
        family.name,
        family.covers,
        ", ".join(family.models),
        sites(family),
        rotary(family),
        family.dimensions,
        ", ".join(("forward", *family.pipelines)),
    )


def sites(family: Family) -> str:
    """What `where` can be, and of which modules."""
    modules = [site.kind for block in family.blocks for site in block.modules]
    offers = [where for where in ("span", "block", "module", "kv") if where in family.offers]
    if family.skips and "span" in offers:
        offers.remove("span")  # in this family, every span is a single block
    return ", ".join(offers).replace("module", f"module ({', '.join(dict.fromkeys(modules))})")


def rotary(family: Family) -> str:
    """Whether it has rotary positions, and if so, with one table for all samples or one for each."""
    places = [(block.whole, *block.modules, *block.keys) for block in family.blocks]
    axes = {rows.axis for sites in places for site in sites if site for rows in site.rotary}
    if not axes:
        return "-"
    return "one table" if axes == {0} else "by sample"


def text() -> str:
    rows = [HEADER, *map(row, FAMILIES)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in rows]
    return "\n".join(lines)


def narrow(width: int) -> str:
    """A few lines for each family, for terminals."""
    indent = max(len(family.name) for family in FAMILIES) + 2
    lines = []
    for name, covers, *rest in map(row, FAMILIES):
        about = "; ".join(f"{label}: {cell}" for label, cell in zip(HEADER[2:], rest) if cell != "-")
        for part, start in ((covers, name), (about, "")):
            lines += textwrap.wrap(
                part, width, initial_indent=start.ljust(indent), subsequent_indent=" " * indent
            )
    return "\n".join(lines)


def markdown() -> str:
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    for name, covers, models, *rest in map(row, FAMILIES):
        lines.append("| " + " | ".join((code(name), covers, code(models), *rest)) + " |")
    return "\n".join(lines)


def refused(markdown: bool = False) -> str:
    """Classes with the same reason in one line."""
    reasons: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        reasons.setdefault(reason, []).append(name)
    names = {reason: ", ".join(sorted(names)) for reason, names in reasons.items()}
    if markdown:
        return "\n".join(f"- {code(those)}: {reason}." for reason, those in names.items())
    return "\n".join(f"{those}: {reason}" for reason, those in names.items())


def code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))
