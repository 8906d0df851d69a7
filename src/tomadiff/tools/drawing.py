"""Draw contact sheets, merge maps and tables."""

from __future__ import annotations

import colorsys

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .merge_map import MergeMap

MARGIN = 8
LABEL = 16  # height of a line of text, in pixels
INK, PAPER, MARK = (32, 32, 36), (255, 255, 255), (214, 40, 60)
HEAT = ((8, 8, 20), (74, 22, 110), (168, 44, 96), (236, 110, 48), (252, 206, 90), (255, 255, 230))


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


def draw_merge_map(
    picture: Image.Image,
    mapped: MergeMap,
    side: int = 512,
    groups: bool = False,
    chosen: int | None = None,
) -> Image.Image:
    """A picture with its tokens drawn over it.

    Tokens that share a destination share their mean colour, or with `groups` one of their own;
    destinations are dots; thin lines part groups, thick ones regions. Where a token is chosen, its group
    stands out.
    """
    if len(mapped.grid) != 2:
        raise ValueError("a picture is one frame of a video: draw_merge_map(picture, mapped.frame(number))")
    height, width = mapped.grid
    cell = cell_of(mapped, side)
    base = picture.convert("RGB").resize((width * cell, height * cell), Image.Resampling.NEAREST)
    owners = mapped.owners.reshape(height, width).numpy()
    colours = _own_colours(owners) if groups else _mean_colours(base, owners, cell)
    drawn = Image.blend(base, _enlarged(colours, cell), 0.65)
    if chosen is not None:
        ours = owners == mapped.owners[chosen].item()
        faded = Image.blend(drawn, Image.new("RGB", drawn.size, PAPER), 0.7)
        drawn = Image.composite(drawn, faded, _enlarged(ours.astype(np.uint8) * 255, cell))
    pen = ImageDraw.Draw(drawn)
    _borders(pen, owners, cell, (90, 90, 96), 1)
    _borders(pen, mapped.regions.reshape(height, width).numpy(), cell, INK, 2)
    if chosen is not None:
        _borders(pen, ours, cell, MARK, 3)
        x, y = chosen % width * cell, chosen // width * cell
        pen.rectangle((x, y, x + cell - 1, y + cell - 1), outline=MARK, width=2)
    radius = max(1, cell // 5)
    for token in mapped.destinations.tolist():
        x, y = (token % width + 0.5) * cell, (token // width + 0.5) * cell
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=PAPER, outline=INK)
    return drawn


def cell_of(mapped: MergeMap, side: int = 512) -> int:
    """The side of a token in a merge map, in pixels."""
    return max(4, side // max(mapped.grid))


def difference(a: Image.Image, b: Image.Image) -> tuple[Image.Image, int]:
    """Where two pictures differ, from dark to bright, and the brightest: the largest difference, of 255."""
    apart = np.abs(np.asarray(a.convert("RGB"), dtype=int) - np.asarray(b.convert("RGB"), dtype=int)).max(-1)
    most = int(apart.max())
    heat = apart / max(most, 1)
    places = np.linspace(0, 1, len(HEAT))
    pixels = np.stack([np.interp(heat, places, channel) for channel in zip(*HEAT)], -1)
    return Image.fromarray(pixels.round().astype(np.uint8)), most


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


def _own_colours(owners: np.ndarray) -> np.ndarray:
    """[H, W, 3] a colour for each group; hues go round by the golden angle, so that neighbours differ."""
    _, group = np.unique(owners.ravel(), return_inverse=True)
    hues = (np.arange(group.max() + 1) * 0.381966) % 1
    wheel = [colorsys.hls_to_rgb(hue, (0.45, 0.6, 0.72)[n % 3], 0.65) for n, hue in enumerate(hues)]
    return (np.array(wheel)[group] * 255).round().astype(np.uint8).reshape(*owners.shape, 3)


def _enlarged(pixels: np.ndarray, cell: int) -> Image.Image:
    """Enlarge every pixel to a square."""
    return Image.fromarray(pixels.repeat(cell, 0).repeat(cell, 1))


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
