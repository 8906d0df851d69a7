"""The emoji that the embedded models draw: their names, their pictures, and how these become latents.

`emoji.png`, next to this file, has all pictures in one sheet; scripts/train_emoji made it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

SHEET = Path(__file__).with_name("emoji.png")
SIZE = 64  # pixels per side of one emoji
SHEET_COLUMNS = 8

# Prompt -> `short_name` in emoji.json of npm's emoji-datasource-google. Chosen to differ in shape or
# colour, and to have everyday names.
EMOJI = {
    "grapes": "grapes",
    "watermelon": "watermelon",
    "lemon": "lemon",
    "banana": "banana",
    "pineapple": "pineapple",
    "red apple": "apple",
    "green apple": "green_apple",
    "cherries": "cherries",
    "strawberry": "strawberry",
    "kiwi": "kiwifruit",
    "avocado": "avocado",
    "carrot": "carrot",
    "corn": "corn",
    "hot pepper": "hot_pepper",
    "broccoli": "broccoli",
    "pretzel": "pretzel",
    "cheese": "cheese_wedge",
    "hamburger": "hamburger",
    "french fries": "fries",
    "pizza": "pizza",
    "hot dog": "hotdog",
    "taco": "taco",
    "sushi": "sushi",
    "ice cream": "icecream",
    "doughnut": "doughnut",
    "birthday cake": "birthday",
    "dog": "dog",
    "cat": "cat",
    "fox": "fox_face",
    "lion": "lion_face",
    "tiger": "tiger",
    "pig": "pig",
    "panda": "panda_face",
    "elephant": "elephant",
    "penguin": "penguin",
    "owl": "owl",
    "flamingo": "flamingo",
    "frog": "frog",
    "turtle": "turtle",
    "tropical fish": "tropical_fish",
    "octopus": "octopus",
    "crab": "crab",
    "butterfly": "butterfly",
    "ladybug": "ladybug",
    "sunflower": "sunflower",
    "cactus": "cactus",
    "palm tree": "palm_tree",
    "mushroom": "mushroom",
}
PROMPTS = tuple(EMOJI)


def load_emoji(sheet: Path = SHEET) -> Tensor:
    """The pictures in the order of `PROMPTS`: [48, 3, 64, 64] in [-1, 1]."""
    pixels = torch.from_numpy(np.array(Image.open(sheet).convert("RGB")))
    tiles = pixels.unflatten(0, (-1, SIZE)).unflatten(2, (SHEET_COLUMNS, SIZE))  # row, y, column, x, rgb
    tiles = tiles.permute(0, 2, 4, 1, 3).flatten(0, 1)[: len(PROMPTS)]
    return tiles.float() / 127.5 - 1


def to_latents(images: Tensor) -> Tensor:
    """[B, 3, H, W] -> [B, 12, H/2, W/2], lossless: takes the place of a VAE."""
    return F.pixel_unshuffle(images, 2)


def to_images(latents: Tensor) -> Tensor:
    """The inverse of `to_latents`."""
    return F.pixel_shuffle(latents, 2)
