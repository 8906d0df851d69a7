"""The pictures that the embedded models learn from: Fluent emoji on coloured backgrounds.

`python -m train_demo.data` fetches the emoji with `npm pack` and writes them, small and transparent, as the
sheet `things.png` next to this file. Training and evaluation read that sheet, so they need no network.

Fluent Emoji, copyright Microsoft Corporation, MIT License: see NOTICE in src/tomadiff/tools/demo.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tomadiff.tools.demo.prompts import COLOURS, PLACEMENTS, THINGS, Scene

PICTURES = "@lobehub/fluent-emoji-3d@1.1.0"
NAMES = "emoji-datasource-google@16.0.0"
SHEET = Path(__file__).with_name("things.png")
SHEET_COLUMNS = 12
SIZE = 128  # pixels per side of a picture
THING_SIZE = 104  # pixels per side of the thing in it, an empty border included
LEFT_EDGE = {"": 12, "left": -4, "right": 28}  # of the thing; whole patches of 4 pixels apart
TOP_EDGE = 10


def load_things(sheet: Path = SHEET) -> Tensor:
    """The things in the order of `THINGS`: [96, 4, 104, 104] in [0, 1], colours multiplied by opacity."""
    pixels = torch.from_numpy(np.array(Image.open(sheet).convert("RGBA"))).float() / 255
    tiles = pixels.unflatten(0, (-1, THING_SIZE)).unflatten(2, (SHEET_COLUMNS, THING_SIZE))
    tiles = tiles.permute(0, 2, 4, 1, 3).flatten(0, 1)[: len(THINGS)]  # row, y, column, x, rgba
    return torch.cat([tiles[:, :3] * tiles[:, 3:], tiles[:, 3:]], 1)


def backgrounds() -> Tensor:
    """One for each of `COLOURS`: [8, 3, 128, 128] in [0, 1], lighter at the top left."""
    across = torch.linspace(-1, 1, SIZE)
    light = 1 - 0.07 * (across[:, None] + across) - 0.05 * (across[:, None] ** 2 + across**2)
    colours = torch.tensor(list(COLOURS.values())) / 255
    return (colours[:, :, None, None] * light).clamp(0, 1)


def shadows(things: Tensor) -> Tensor:
    """[N, 1, 128, 128] how much a soft shadow below each thing, placed in the middle, darkens the picture."""
    left = LEFT_EDGE[""]
    pad = (left, SIZE - THING_SIZE - left, TOP_EDGE + 8, SIZE - THING_SIZE - TOP_EDGE - 8)
    offsets = torch.arange(-12, 13)
    kernel = torch.exp(-0.5 * (offsets / 5.0) ** 2)
    kernel /= kernel.sum()
    shade = F.pad(things[:, 3:], pad)
    shade = F.conv2d(F.pad(shade, (12, 12, 0, 0)), kernel.view(1, 1, 1, -1))
    shade = F.conv2d(F.pad(shade, (0, 0, 12, 12)), kernel.view(1, 1, -1, 1))
    return 0.28 * shade


class Composer:
    """Draws scenes; layers are prepared once, so that a batch is a few multiplications."""

    def __init__(self, sheet: Path = SHEET) -> None:
        things = load_things(sheet)
        self.backgrounds = backgrounds()
        shade = shadows(things)
        middle = LEFT_EDGE[""]
        pad = (middle, SIZE - THING_SIZE - middle, TOP_EDGE, SIZE - THING_SIZE - TOP_EDGE)
        layers = F.pad(things, pad)
        layers = torch.cat([layers[:, :3], (1 - shade) * (1 - layers[:, 3:])], 1)  # colour, light let through
        self.layers = [self._moved(layers, LEFT_EDGE[name] - middle) for name in PLACEMENTS]

    @staticmethod
    def _moved(layers: Tensor, pixels: int) -> Tensor:
        moved = layers.roll(pixels, -1)
        # What rolled in from the other side is empty but for the faintest of the shadow.
        edge = slice(0, pixels) if pixels > 0 else slice(SIZE + pixels, SIZE)
        if pixels:
            moved[:, :3, :, edge], moved[:, 3:, :, edge] = 0, 1
        return moved

    def __call__(self, scenes: list[Scene]) -> Tensor:
        """[B, 3, 128, 128] in [-1, 1]."""
        layers = torch.stack([self.layers[s.placement][s.thing] for s in scenes])
        behind = self.backgrounds[[s.colour for s in scenes]]
        return 2 * (layers[:, :3] + behind * layers[:, 3:]) - 1


def fetch(package: str, folder: Path) -> tarfile.TarFile:
    done = subprocess.run(
        ["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True, text=True
    )
    return tarfile.open(folder / done.stdout.split()[-1])


def write_sheet(sheet: Path = SHEET) -> None:
    """Fetch both npm packages and write the chosen emoji as one lossless, transparent picture."""
    rows = -(-len(THINGS) // SHEET_COLUMNS)
    picture = Image.new("RGBA", (SHEET_COLUMNS * THING_SIZE, rows * THING_SIZE))
    with tempfile.TemporaryDirectory() as folder:
        with fetch(NAMES, Path(folder)) as archive:
            listed = json.load(archive.extractfile("package/emoji.json"))
        codes = {entry["short_name"]: entry["unified"].lower() for entry in listed}
        with fetch(PICTURES, Path(folder)) as archive:
            files = set(archive.getnames())
            for i, short_name in enumerate(THINGS.values()):
                code = codes[short_name]
                names = [f"package/assets/{c}.webp" for c in (code, code.replace("-fe0f", ""))]
                name = next(n for n in names if n in files)
                emoji = Image.open(io.BytesIO(archive.extractfile(name).read())).convert("RGBA")
                emoji = emoji.resize((THING_SIZE, THING_SIZE), Image.Resampling.LANCZOS)
                column, row = i % SHEET_COLUMNS, i // SHEET_COLUMNS
                picture.paste(emoji, (column * THING_SIZE, row * THING_SIZE))
    picture.save(sheet, optimize=True)


if __name__ == "__main__":
    write_sheet()
    print(f"{len(THINGS)} things -> {SHEET}")
