"""SkyReels without forcing: all frames at one timestep, and each sees all."""

from __future__ import annotations

import diffusers
from seeded import bare_pipeline
from torch import nn

from . import skyreels, wan

MODEL, SETTINGS = skyreels.MODEL, wan.SETTINGS
GRID, ODD = wan.GRID, wan.ODD
call, request = wan.call, wan.request


def pipeline(model: nn.Module) -> diffusers.DiffusionPipeline:
    return bare_pipeline("SkyReelsV2Pipeline", model, skyreels.scheduler())
