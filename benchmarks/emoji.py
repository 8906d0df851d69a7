"""Pictures to measure on where no model draws them: 48 emoji.

`emoji.png`, next to this file, has them in one sheet: Noto Emoji, copyright Google LLC, Apache License 2.0,
from the npm package emoji-datasource-google 16.0.0, on white.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

SHEET = Path(__file__).with_name("emoji.png")
SIZE = 64  # pixels per side of one emoji
SHEET_COLUMNS = 8


def load_emoji() -> Tensor:
    """[48, 3, 64, 64] in [-1, 1]."""
    pixels = torch.from_numpy(np.array(Image.open(SHEET).convert("RGB")))
    tiles = pixels.unflatten(0, (-1, SIZE)).unflatten(2, (SHEET_COLUMNS, SIZE))  # row, y, column, x, rgb
    return tiles.permute(0, 2, 4, 1, 3).flatten(0, 1).float() / 127.5 - 1
