"""Results of the studio, which it keeps for a while."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from PIL import Image

from tomadiff.config import Config
from tomadiff.tools.merge_map import MergeMap

from .generation import GenerationRequest

Value = TypeVar("Value")


@dataclass(frozen=True)
class Drawn:
    picture: Image.Image
    seconds: float


@dataclass(frozen=True)
class Merged(Drawn):
    """A picture from merged tokens, beside the dense one."""

    config: Config
    settings: dict[str, Any]  # what the config came to
    tokens: int  # on the finest grid
    kept: int  # tokens left of these in a merged step
    steps: int
    merged_steps: int
    psnr: float  # infinite where nothing changed
    ssim: float


@dataclass(frozen=True)
class Comparison:
    generation: GenerationRequest
    dense: Drawn
    merged: Merged
    dense_was_kept: bool
    maps: dict[int, MergeMap]  # by step; dense steps have none
    no_maps: str = ""  # why there are none at all

    @property
    def speedup(self) -> float:
        return self.dense.seconds / self.merged.seconds


@dataclass(frozen=True)
class Sweep:
    generation: GenerationRequest
    dense: Drawn
    cells: dict[tuple[str, float], Merged]  # by method and ratio
    left_out: list[str]  # reasons, one for each cell that is missing


class Kept(Generic[Value]):
    """A small cache by name: the oldest entries are dropped."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.values: OrderedDict[Any, Value] = OrderedDict()

    def get(self, name: Any) -> Value | None:
        if name in self.values:
            self.values.move_to_end(name)
        return self.values.get(name)

    def take(self, name: Any) -> Value | None:
        return self.values.pop(name, None)

    def put(self, name: Any, value: Value) -> None:
        self.values[name] = value
        self.values.move_to_end(name)
        while len(self.values) > self.most:
            self.values.popitem(last=False)
