"""A tiny real model for each family, a file each: adding a file adds a model to the tests of all families.

A file says

    MODEL     the name of a class of diffusers
    SETTINGS  its arguments: few layers, a width of 32 or so
    call      its arguments for samples of these seeds, on this grid of tokens, at a time from 1 (noise) to 0;
              less than 40 tokens of text, and a sample that doesn't depend on the others

and may say

    GRID, ODD  a grid of tokens, and one that regions don't divide, if not in two dimensions
    LEVELS     how far its blocks' grids are downsampled, if at all
    NEEDS      arguments that the model doesn't take in older releases
    REFUSES    methods that it can't have
    pipeline   a real pipeline around the model, where one runs without downloads, and
    request    its arguments for samples of these seeds
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
NEWEST = re.search(r"^diffusers==(.*)$", CONSTRAINTS.read_text(), re.MULTILINE)[1]
NAMES = sorted(module.name for module in pkgutil.iter_modules(__path__))


def tiny(name: str) -> ModuleType:
    """The file of that name; skips the test where this diffusers is too old to have its model."""
    try:
        module = importlib.import_module(f"tiny.{name}")
        takes = inspect.signature(getattr(diffusers, module.MODEL).forward).parameters
        for argument in getattr(module, "NEEDS", ()):
            takes[argument]
    except (ImportError, AttributeError, KeyError) as error:
        if diffusers.__version__ == NEWEST:
            raise
        pytest.skip(f"{name}: diffusers {diffusers.__version__} is older: {error}")
    return module


def build(module: ModuleType, **more: Any) -> nn.Module:
    """The model with seeded weights, also where it starts with zeros: else, tokens would not matter."""
    torch.manual_seed(0)
    model = getattr(diffusers, module.MODEL)(**{**module.SETTINGS, **more}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any() or parameter.ndim == 3:  # stacks of experts come without values
                parameter.normal_(std=0.2)
    return model


@torch.no_grad()
def called(
    model: nn.Module,
    case: ModuleType,
    time: float = 0.5,
    seeds: tuple[int, ...] = (0,),
    grid: tuple[int, ...] | None = None,
) -> Any:
    """All that the model returns."""
    call = case.call(model, grid or grid_of(case), seeds, time)
    inner = getattr(model, "_orig_mod", model)  # of a compiled one
    if "return_dict" in inspect.signature(type(inner).forward).parameters:
        call["return_dict"] = False
    return model(**call)


def run(
    model: nn.Module,
    case: ModuleType,
    seeds: tuple[int, ...] = (0,),
    grid: tuple[int, ...] | None = None,
    time: float = 0.5,
) -> Tensor:
    """What the model predicts, a row a sample."""
    output = called(model, case, time, seeds, grid)
    output = output[0] if isinstance(output, tuple) else output
    return torch.stack(output) if isinstance(output, list) else output


def grid_of(case: ModuleType) -> tuple[int, ...]:
    return getattr(case, "GRID", (8, 8))


def draw(pipe: diffusers.DiffusionPipeline, case: ModuleType, seeds: tuple[int, ...] = (0,)) -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    request = {"num_inference_steps": 2, "output_type": "latent", "return_dict": False}
    return torch.as_tensor(pipe(**request | case.request(seeds))[0])
