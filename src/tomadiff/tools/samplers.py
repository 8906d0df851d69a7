"""Schedulers of diffusers by their common names, configured like a pipeline's own scheduler."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import diffusers
from diffusers import DiffusionPipeline, SchedulerMixin

from tomadiff.errors import ConfigError

ODE, SDE = {"algorithm_type": "dpmsolver++"}, {"algorithm_type": "sde-dpmsolver++"}
PLAIN, STOCHASTIC = {"stochastic_sampling": False}, {"stochastic_sampling": True}
Choice = tuple[str, dict[str, Any]]  # a class of diffusers, and settings on top of the pipeline's config

DIFFUSION: dict[str, Choice] = {
    "euler": ("EulerDiscreteScheduler", {}),
    "euler-a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "pndm": ("PNDMScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    "tcd": ("TCDScheduler", {}),
    "dpm++": ("DPMSolverMultistepScheduler", ODE),
    "dpm++sde": ("DPMSolverMultistepScheduler", SDE),
    "unipc": ("UniPCMultistepScheduler", {}),
    "deis": ("DEISMultistepScheduler", {}),
}
# no DEIS for flow matching: diffusers' ends one step too early
FLOW_MATCHING: dict[str, Choice] = {
    "euler": ("FlowMatchEulerDiscreteScheduler", PLAIN),
    "stochastic": ("FlowMatchEulerDiscreteScheduler", STOCHASTIC),
    "heun": ("FlowMatchHeunDiscreteScheduler", {}),
    "lcm": ("FlowMatchLCMScheduler", {}),
    "dpm++": ("DPMSolverMultistepScheduler", ODE),
    "dpm++sde": ("DPMSolverMultistepScheduler", SDE),
    "unipc": ("UniPCMultistepScheduler", {}),
}
NAMES = tuple(dict.fromkeys([*DIFFUSION, *FLOW_MATCHING]))


def scheduler_by_name(name: str, like: SchedulerMixin) -> SchedulerMixin:
    """A scheduler for the same model as another one: the same noise, prediction and shift of time."""
    flow = matches_flows(like)
    known = FLOW_MATCHING if flow else DIFFUSION
    if name not in known:
        kind = "matches flows" if flow else "predicts noise"
        raise ConfigError(
            f"there is no scheduler {name!r} for a model that {kind}; there are {', '.join(known)}"
        )
    class_name, settings = known[name]
    scheduler = getattr(diffusers, class_name, None)
    if scheduler is None:
        raise ConfigError(
            f"{name} needs diffusers' {class_name}, which diffusers {diffusers.__version__} lacks"
        )
    if flow and "use_flow_sigmas" in inspect.signature(scheduler).parameters:
        flow_shift = {"flow_shift": like.config.get("shift", like.config.get("flow_shift", 1.0))}
        settings = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"} | flow_shift | settings
    elif flow:
        settings = {"shift": like.config.get("shift", like.config.get("flow_shift", 1.0))} | settings
    return scheduler.from_config(like.config, **settings)


def matches_flows(scheduler: SchedulerMixin) -> bool:
    return "FlowMatch" in type(scheduler).__name__ or bool(scheduler.config.get("use_flow_sigmas"))


@contextmanager
def sampled_by(pipe: DiffusionPipeline, name: str) -> Iterator[None]:
    """Another scheduler in a pipeline for the length of a `with` block."""
    before = pipe.scheduler
    pipe.scheduler = scheduler_by_name(name, before)
    try:
        yield
    finally:
        pipe.scheduler = before
