"""Load models from a folder or the hub, with their preprocessing of pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import torch.nn.functional as F
from torch import Tensor

from tomadiff.runtime.files import parse_json
from tomadiff.tools.hub import trouble

from .weights import NotAvailable


def pretrained(what: str, name: str, kind: str) -> Any:
    """A folder or a hub id, loaded by transformers' class `kind`; a copy at hand comes before the hub."""
    try:
        import transformers
    except ImportError as error:
        raise NotAvailable(f"{what} needs transformers: pip install 'transformers>=5'") from error
    if _file(name, "config.json") is None:
        raise NotAvailable(
            f"{what}: {name!r} is no folder with a model, and the hub, where it may be one, is out of reach "
            f"or has none of that name: go online once, or pass the folder of one (--{what.lower()}-model)"
        )
    loader = getattr(transformers, kind)
    has_weights = not kind.endswith("Tokenizer")
    more = {"output_loading_info": True} if has_weights else {}
    more["trust_remote_code"] = False  # None would ask on the terminal whether to run it
    for local in _local_first(name):
        try:
            loaded = loader.from_pretrained(name, local_files_only=local, **more)
            break
        except Exception as error:  # transformers, safetensors and the hub's client each have some
            reason = str(error).strip().splitlines()[0]
    else:
        raise NotAvailable(f"{what}: can't load {name!r} as a {kind}: {reason}")
    if not has_weights:
        return loaded
    model, info = loaded
    # transformers fills what is missing with random numbers; the pooler of a ViT is not used here
    missing = [key for key in info["missing_keys"] if "pooler" not in key]
    if missing:
        raise NotAvailable(f"{what}: {name!r} has no weights for {missing[0]} and {len(missing) - 1} more")
    return model.eval()


@dataclass(frozen=True)
class Preparation:
    """How a picture becomes a network's input: the shorter side to `size`, the middle `crop`, normalised."""

    size: int
    crop: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, name: str, side: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Preparation:
        """As the model's own preprocessor_config.json says, or as given where it has none."""
        file = _file(name, "preprocessor_config.json")
        try:
            said = parse_json(file.read_text()) if file else {}
            size = _side(said.get("size"), side)
            crop = _side(said.get("crop_size"), size) if said.get("do_center_crop") else size
            mean, std = (
                tuple(float(value) for value in said.get(key) or usual)
                for key, usual in (("image_mean", mean), ("image_std", std))
            )
            return cls(max(size, crop), crop, mean, std)
        except (ValueError, TypeError, AttributeError) as error:
            raise NotAvailable(f"{file} does not say how pictures are prepared: {error}") from error

    def __call__(self, pictures: Tensor) -> Tensor:
        height, width = pictures.shape[-2:]
        scale = self.size / min(height, width)
        height, width = round(height * scale), round(width * scale)
        x = F.interpolate(pictures, (height, width), mode="bicubic", antialias=True).clamp(0, 1)
        top, left = (height - self.crop) // 2, (width - self.crop) // 2
        x = x[..., top : top + self.crop, left : left + self.crop]
        mean, std = (torch.tensor(values, device=x.device).view(3, 1, 1) for values in (self.mean, self.std))
        return (x - mean) / std


def _side(said: int | dict[str, int] | None, otherwise: int) -> int:
    if isinstance(said, dict):
        said = said.get("shortest_edge") or said.get("height")
    return said or otherwise


def _file(name: str, file: str) -> Path | None:
    """A file of a model, from its folder, the cache of the hub, or the hub; None if it can't be had."""
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    for local in _local_first(name):
        try:
            return Path(huggingface_hub.hf_hub_download(name, file, local_files_only=local))
        except Exception:  # no connection, no such model, no such file: each has its own exception
            continue
    return None


def _local_first(name: str) -> Iterator[bool]:
    """Values for `local_files_only`: a copy at hand is used without asking the hub."""
    yield True
    if not Path(name).is_dir() and _hub_answers():
        yield False


@cache
def _hub_answers() -> bool:
    return trouble() is None
