"""What the embedded models can draw: a thing, on a background colour, in the middle or to one side."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

# Name in prompts -> short name in the emoji data. Chosen to differ in shape or colour and to have everyday
# names without colour words, since these name the background.
THINGS = {
    # animals
    "dog": "dog",
    "cat": "cat",
    "fox": "fox_face",
    "lion": "lion_face",
    "tiger": "tiger",
    "pig": "pig",
    "panda": "panda_face",
    "koala": "koala",
    "rabbit": "rabbit",
    "frog": "frog",
    "unicorn": "unicorn_face",
    "elephant": "elephant",
    "giraffe": "giraffe_face",
    "penguin": "penguin",
    "owl": "owl",
    "parrot": "parrot",
    "flamingo": "flamingo",
    "chick": "hatched_chick",
    "turtle": "turtle",
    "crocodile": "crocodile",
    "dinosaur": "sauropod",
    "whale": "whale",
    "dolphin": "dolphin",
    "tropical fish": "tropical_fish",
    "octopus": "octopus",
    "crab": "crab",
    "snail": "snail",
    "bee": "bee",
    "butterfly": "butterfly",
    "ladybug": "ladybug",
    # plants
    "sunflower": "sunflower",
    "tulip": "tulip",
    "rose": "rose",
    "cactus": "cactus",
    "palm tree": "palm_tree",
    "mushroom": "mushroom",
    "clover": "four_leaf_clover",
    "maple leaf": "maple_leaf",
    # food and drink
    "apple": "apple",
    "pear": "pear",
    "lemon": "lemon",
    "banana": "banana",
    "watermelon": "watermelon",
    "grapes": "grapes",
    "strawberry": "strawberry",
    "cherries": "cherries",
    "pineapple": "pineapple",
    "kiwi": "kiwifruit",
    "avocado": "avocado",
    "carrot": "carrot",
    "corn": "corn",
    "broccoli": "broccoli",
    "hot pepper": "hot_pepper",
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
    "cupcake": "cupcake",
    "lollipop": "lollipop",
    "coffee": "coffee",
    "cocktail": "tropical_drink",
    # places, weather and vehicles
    "house": "house",
    "castle": "european_castle",
    "volcano": "volcano",
    "rainbow": "rainbow",
    "moon": "crescent_moon",
    "sun": "sun_with_face",
    "planet": "ringed_planet",
    "star": "star",
    "cloud": "partly_sunny",
    "snowman": "snowman_without_snow",
    "umbrella": "umbrella",
    "rocket": "rocket",
    "airplane": "airplane",
    "car": "car",
    "bus": "bus",
    "tractor": "tractor",
    "sailboat": "boat",
    # things made
    "balloon": "balloon",
    "gift": "gift",
    "trophy": "trophy",
    "basketball": "basketball",
    "soccer ball": "soccer",
    "guitar": "guitar",
    "trumpet": "trumpet",
    "crown": "crown",
    "gem": "gem",
    "key": "key",
    "light bulb": "bulb",
}

# Name -> sRGB of the background in the middle of the picture.
COLOURS = {
    "white": (246, 246, 244),
    "red": (233, 106, 100),
    "orange": (247, 178, 103),
    "yellow": (250, 224, 120),
    "green": (134, 204, 142),
    "blue": (120, 178, 236),
    "purple": (172, 142, 220),
    "pink": (246, 172, 200),
}

PLACEMENTS = ("", "left", "right")  # no word: in the middle


class Scene(NamedTuple):
    """One picture that the models can draw, as indices into `THINGS`, `COLOURS` and `PLACEMENTS`."""

    thing: int
    colour: int
    placement: int

    @property
    def prompt(self) -> str:
        thing, colour = list(THINGS)[self.thing], list(COLOURS)[self.colour]
        placement = f" on the {PLACEMENTS[self.placement]}" if self.placement else ""
        return f"{thing}{placement} on {colour}"

    @property
    def held_out(self) -> bool:
        """Whether training never shows it: one colour of every thing, and every eighth thing on the right."""
        new_colour = (self.thing + self.colour) % len(COLOURS) == 0
        new_placement = self.thing % 8 == 5 and PLACEMENTS[self.placement] == "right"
        return new_colour or new_placement


SCENES = [
    Scene(*indices) for indices in product(range(len(THINGS)), range(len(COLOURS)), range(len(PLACEMENTS)))
]


def _one_for_each_thing() -> list[Scene]:
    """Scenes that training shows, with backgrounds and placements in turn."""
    seen = [
        [scene for scene in SCENES if scene.thing == i and not scene.held_out] for i in range(len(THINGS))
    ]
    return [scenes[5 * i % len(scenes)] for i, scenes in enumerate(seen)]


PROMPTS = tuple(scene.prompt for scene in _one_for_each_thing())  # what evaluations draw


def vocabulary() -> list[str]:
    """Every word that means something to the models, sorted."""
    return sorted({word for name in (*THINGS, *COLOURS, *PLACEMENTS) for word in name.split()})
