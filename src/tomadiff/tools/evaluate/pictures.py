"""Pictures as metrics take them: [B, 3, H, W] in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def as_tensor(pictures: Sequence[Image.Image]) -> Tensor:
    """Pictures of one size."""
    pixels = [torch.from_numpy(np.array(picture.convert("RGB"))) for picture in pictures]
    return torch.stack(pixels).permute(0, 3, 1, 2) / 255


# Pillow reports some broken PNGs as the second, and pictures that would fill the memory as the last
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


def open_picture(path: Path) -> Image.Image:
    """Decode a picture completely, as RGB."""
    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except UNREADABLE as error:
        raise ValueError(f"can't read the picture {path}: {error}") from error


def read_picture(path: Path) -> Tensor:
    """[1, 3, H, W]"""
    return as_tensor([open_picture(path)])


def check(*pictures: Tensor) -> None:
    for x in pictures:
        if x.ndim != 4 or x.shape[1] != 3 or x.shape != pictures[0].shape:
            shapes = ", ".join(str(list(p.shape)) for p in pictures)
            raise ValueError(f"pictures must be [B, 3, H, W], all of one size, not {shapes}")
        if not (x.min() > -0.01 and x.max() < 1.01):  # resizing may exceed the range a little
            raise ValueError(f"pictures must be in [0, 1], not [{x.min():.3g}, {x.max():.3g}]")
