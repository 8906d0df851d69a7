"""What merging did, to look at: contact sheets, merge maps and tables."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .maps import MergeMap

MARGIN = 8
LABEL = 16  # pixels of text
INK, PAPER = (32, 32, 36), (255, 255, 255)


def contact_sheet(
    rows: list[list[Image.Image]],
    columns: list[str],
    names: list[str],
    captions: list[list[str]] | None = None,
) -> Image.Image:
    """Pictures of one size in named rows and columns, each with a caption below where there are captions."""
    width, height = rows[0][0].size
    gutter = max(int(font().getlength(name)) for name in names) + 2 * MARGIN
    widest = max(width, *(int(font().getlength(column)) for column in columns))
    cell = (widest + MARGIN, height + MARGIN + (LABEL if captions else 0))
    size = (gutter + len(columns) * cell[0], 2 * MARGIN + LABEL + len(rows) * cell[1])
    sheet = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(sheet)
    for place, column in enumerate(columns):
        pen.text((gutter + place * cell[0] + widest / 2, MARGIN), column, INK, font(), anchor="ma")
    for line, (row, name) in enumerate(zip(rows, names)):
        top = 2 * MARGIN + LABEL + line * cell[1]
        pen.text((gutter - MARGIN, top + height / 2), name, INK, font(), anchor="rm")
        for place, picture in enumerate(row):
            left = gutter + place * cell[0] + (widest - width) // 2
            sheet.paste(picture, (left, top))
            if captions:
                text = captions[line][place]
                pen.text((left + width / 2, top + height + 2), text, INK, font(12), anchor="ma")
    return sheet


def merge_map(picture: Image.Image, mapped: MergeMap, side: int = 512) -> Image.Image:
    """A picture with its tokens drawn over it.

    Tokens that share a destination share their mean colour; destinations are dots; thin lines
    part groups, thick ones regions.
    """
    height, width = mapped.grid
    cell = max(4, side // max(mapped.grid))
    base = picture.convert("RGB").resize((width * cell, height * cell), Image.Resampling.NEAREST)
    owners = mapped.owners.reshape(height, width).numpy()
    colours = _mean_colours(base, owners, cell)
    tinted = Image.fromarray(np.kron(colours, np.ones((cell, cell, 1), dtype=np.uint8)))
    drawn = Image.blend(base, tinted, 0.65)
    pen = ImageDraw.Draw(drawn)
    _borders(pen, owners, cell, (90, 90, 96), 1)
    _borders(pen, mapped.regions.reshape(height, width).numpy(), cell, INK, 2)
    radius = max(1, cell // 5)
    for token in mapped.destinations.tolist():
        x, y = (token % width + 0.5) * cell, (token // width + 0.5) * cell
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=PAPER, outline=INK)
    return drawn


def beside(pictures: list[Image.Image], labels: list[str]) -> Image.Image:
    """Pictures in a row, each with a label above; small ones are enlarged, pixel by pixel."""
    factor = max(1, 256 // pictures[0].width)
    size = (pictures[0].width * factor, pictures[0].height * factor)
    return contact_sheet([[p.resize(size, Image.Resampling.NEAREST) for p in pictures]], labels, [""])


def markdown(columns: dict[str, list[str]]) -> str:
    """A table from its columns."""
    lines = [list(columns), ["---"] * len(columns), *map(list, zip(*columns.values()))]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def font(size: int = LABEL - 2) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def _mean_colours(base: Image.Image, owners: np.ndarray, cell: int) -> np.ndarray:
    """[H, W, 3] the mean colour of the tokens of each group: what the picture would be if they were one."""
    tokens = np.asarray(base.resize(owners.shape[::-1], Image.Resampling.BOX), dtype=float).reshape(-1, 3)
    _, group = np.unique(owners.ravel(), return_inverse=True)
    sums = np.zeros((group.max() + 1, 3))
    np.add.at(sums, group, tokens)
    means = sums / np.bincount(group)[:, None]
    return means[group].reshape(*owners.shape, 3).round().astype(np.uint8)


def _borders(
    pen: ImageDraw.ImageDraw, labels: np.ndarray, cell: int, colour: tuple[int, int, int], width: int
) -> None:
    """Lines between neighbours with different labels."""
    for row, column in zip(*np.nonzero(labels[:, 1:] != labels[:, :-1])):
        x = (column + 1) * cell
        pen.line((x, row * cell, x, (row + 1) * cell), colour, width)
    for row, column in zip(*np.nonzero(labels[1:] != labels[:-1])):
        y = (row + 1) * cell
        pen.line((column * cell, y, (column + 1) * cell, y), colour, width)
