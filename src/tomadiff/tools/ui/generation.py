"""Requests of the page, checked: whatever a browser or a script sends, only valid ones get further."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tomadiff.config import CHOICES, PRESETS, Config
from tomadiff.models import Family
from tomadiff.tools.demo.embedded import EMBEDDED
from tomadiff.tools.generate import Request
from tomadiff.tools.method_spec import METHODS, configuration, parse

# "ideal" is an upper limit of speed: its pictures are noise
OFFERED = tuple(name for name in METHODS if name != "ideal")
MAX_SEED = 2**32 - 1
# settings that are chosen from a list, beside None for the method's own
CHOSEN: dict[str, tuple[Any, ...]] = {
    **{name: CHOICES[name] for name in ("where", "regions", "assign", "share")},
    **dict.fromkeys(("shift", "weigh_keys"), (True, False)),
}
COUNTED: dict[str, int] = {  # settings that are whole numbers, with their largest values
    "region_size": 64,
    "interval": 1000,
    "refresh_destinations": 1000,
    "refresh_weights": 1000,
    "dense_blocks": 1000,
}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True)
class Limits:
    """The most that a request may ask for."""

    side: int  # pixels
    steps: int = 100
    prompt: int = 500  # characters
    cells: int = 24  # pictures of a sweep


@dataclass(frozen=True)
class GenerationRequest:
    """A picture to draw, and the settings of tomadiff for it."""

    request: Request
    ratio: float = 0.5
    method: str = OFFERED[0]
    settings: Mapping[str, Any] = field(default_factory=dict)  # on top of the method's own

    @property
    def spec(self) -> str:
        """The method with its settings, as method_spec reads it."""
        given = ",".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.method}:{given}" if given else self.method

    def config(self, family: Family) -> Config:
        return configuration(self.spec, self.ratio, family)


def checked(
    limits: Limits,
    *,
    prompt: Any,
    seed: Any,
    steps: Any,
    height: Any,
    width: Any,
    guidance: Any = None,
    ratio: Any = 0.5,
    method: Any = OFFERED[0],
    settings: Mapping[str, Any] | None = None,
) -> GenerationRequest:
    """A request within the limits; a ValueError says what is wrong."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("There is no prompt: say what to draw.")
    if len(prompt) > limits.prompt:
        raise ValueError(f"The prompt has {len(prompt)} characters; at most {limits.prompt} are allowed.")
    if method not in OFFERED:
        raise ValueError(f"There is no method {_short(method)}; there are {', '.join(OFFERED)}.")
    size = _whole("height", height, 16, limits.side), _whole("width", width, 16, limits.side)
    request = Request(
        prompt.strip(),
        _whole("seed", seed, 0, MAX_SEED),
        _whole("steps", steps, 1, limits.steps),
        size,
        None if (given := _typed("guidance", guidance)) is None else _number("guidance", given, 0, 50),
    )
    ratio = _number("ratio", ratio, 0, 0.99)
    return GenerationRequest(request, ratio, method, _checked_settings(settings or {}))


def checked_sweep(generation: GenerationRequest, methods: Any, ratios: Any) -> tuple[list[str], list[float]]:
    """Methods and ratios of a sweep; an empty method means the form's own."""
    for name, values in (("method", methods), ("ratio", ratios)):
        if not isinstance(values, list) or not values:
            raise ValueError(f"Choose at least one {name}.")
    if any(method not in ("", *OFFERED) for method in methods):
        raise ValueError(f"There is an unknown method among {methods!r}"[:200])
    for ratio in ratios:
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < 1:
            raise ValueError(f"ratio: {ratio!r} must be above 0 and below 1"[:200])
    return [method or generation.spec for method in methods], [float(ratio) for ratio in ratios]


def checked_model(name: Any, own: str) -> str:
    """The model the command line named, an embedded one, or a hub id; never a path."""
    if isinstance(name, str):
        if name in (own, *EMBEDDED):
            return name
        if HUB_ID.fullmatch(name) and not Path(name).exists():  # diffusers would load a folder of that name
            return name
    raise ValueError(
        f"{_short(name)} is no model for this page: take {own}, {', '.join(EMBEDDED)} or a hub id."
    )


def code(
    generation: GenerationRequest, model: str, device: str, dtype: str, offload: str | None = None
) -> str:
    """The Python lines that make the same picture."""
    request = generation.request
    if model in EMBEDDED or offload:
        offloaded = f", offload={offload!r}" if offload else ""
        load = [
            "from tomadiff.tools.loading import load",
            "",
            f"pipe = load({model!r}, {device!r}, {dtype!r}{offloaded})",
        ]
    else:
        kind = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[dtype]
        load = [
            "from diffusers import DiffusionPipeline",
            "",
            f"pipe = DiffusionPipeline.from_pretrained({model!r}, dtype=torch.{kind}).to({device!r})",
        ]
    drawn = [
        repr(request.prompt),
        f"num_inference_steps={request.steps}",
        *([f"height={request.size[0]}", f"width={request.size[1]}"] if request.size else []),
        *([] if request.guidance is None else [f"guidance_scale={request.guidance}"]),
        f"generator=torch.Generator().manual_seed({request.seed})",
    ]
    merging = [f"ratio={generation.ratio}", *_keywords(generation)]
    return "\n".join(
        [
            *("import torch", "", "import tomadiff", *load),
            f"tomadiff.apply(pipe, {', '.join(merging)})",
            *("image = pipe(", *(f"    {part}," for part in drawn), ").images[0]"),
            *("image.save('picture.png')", "print(tomadiff.report(pipe))"),
        ]
    )


def _keywords(generation: GenerationRequest) -> list[str]:
    name, settings = parse(generation.spec)
    first = []
    if name in PRESETS:
        first = [f"preset={name!r}"]
    elif name in CHOICES["method"]:
        first = [f"method={name!r}"]
    return first + [f"{name}={value!r}" for name, value in settings.items()]


def _checked_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in given.items():
        if value is None:
            continue
        if name in CHOSEN:
            if not any(value is choice or value == choice for choice in CHOSEN[name]):
                raise ValueError(f"{name}: {_short(value)} is none of {', '.join(map(str, CHOSEN[name]))}.")
            found[name] = value
        elif name in COUNTED:
            number = _typed(name, value)
            if number is not None:
                found[name] = _whole(name, number, 0, COUNTED[name])
        else:
            raise ValueError(f"There is no setting {_short(name)} on this page.")
    return found


def _typed(name: str, value: Any) -> Any:
    """The number in a text field; None if it is empty."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{name}: {_short(value)} must be a number, or nothing.") from None


def _whole(name: str, value: Any, least: int, most: int) -> int:
    number = _number(name, value, least, most)
    if number != int(number):
        raise ValueError(f"{name}: {_short(value)} must be a whole number.")
    return int(number)


def _number(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ValueError(f"{name}: {_short(value)} must be a number.")
    if not least <= value <= most:
        raise ValueError(f"{name}: {value:g} must be from {least:g} to {most:g}.")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
