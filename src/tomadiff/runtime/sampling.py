"""Whether a pipeline's scheduler samples deterministically, and with how many calls of the model a step.

Along a smooth path, what a model expects can be extrapolated. With fresh noise at every step it can only be
held, if it is known what outputs say about the image. An unknown scheduler is treated as one that adds noise.
"""

from __future__ import annotations

import copy
import inspect
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Settings = Mapping[str, Any]  # a scheduler's config, with the arguments of its `step` on top
# rule(scheduler, settings): why fresh noise is added, or None if it is not
NoiseRule = Callable[[Any, Settings], "str | None"]


@dataclass(frozen=True)
class Sampling:
    scheduler: str  # class name; "" without a scheduler
    noise: str | None  # why fresh noise is added, as in "eta=0.3 adds noise at every step"; None if it isn't
    between_steps: bool  # the solver also calls the model at points between two steps, as Heun's does
    known: bool  # False for classes that are not from diffusers, or newer than the table below

    @property
    def deterministic(self) -> bool:
        return self.noise is None


def sampling_of(scheduler: Any, step_arguments: Mapping[str, Any] = {}) -> Sampling:
    """How a scheduler samples if its `step` is called with these arguments and defaults for all others."""
    if scheduler is None:
        return Sampling("", "there is no scheduler to tell whether noise is added", False, known=False)
    name, noise_rule = type(scheduler).__name__, _noise_rule(scheduler)
    if noise_rule is None:
        between = getattr(scheduler, "order", 1) == 2
        return Sampling(name, f"{name} is not known and may add noise at every step", between, known=False)
    settings = ChainMap(dict(step_arguments), _step_defaults(scheduler), dict(scheduler.config))
    between = name in BETWEEN_STEPS and BETWEEN_STEPS[name](settings)
    return Sampling(name, noise_rule(scheduler, settings), between, known=True)


def watch_first_step(scheduler: Any) -> FirstStepWatch | None:
    """Record the arguments of the scheduler's next step; None if they can't decide whether noise is added."""
    rule = _noise_rule(scheduler)
    read = STEP_RULES.get(rule) if rule else None
    if not read or not read & set(_step_defaults(scheduler)):
        return None
    watch = vars(scheduler).get("step") or FirstStepWatch(scheduler)  # two models may share a scheduler
    watch.arguments = None
    return watch


class FirstStepWatch:
    """Replaces `scheduler.step` for one call, and records the arguments that decide whether noise is added.

    Those arguments are never passed to the model. A copy of the scheduler gets a watch of its own.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.arguments: dict[str, Any] | None = None  # None until the step; holds no tensors
        self.__signature__ = inspect.signature(scheduler.step)  # pipelines inspect it for `eta`
        scheduler.step = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.remove()
        # not `self.scheduler.step`, which may be someone else's wrapper around this watch
        result = type(self.scheduler).step(self.scheduler, *args, **kwargs)
        given = self.__signature__.bind(*args, **kwargs).arguments
        self.arguments = {name: given[name] for name in set().union(*STEP_RULES.values()) if name in given}
        return result

    def remove(self) -> None:
        if vars(self.scheduler).get("step") is self:
            del self.scheduler.step

    def __deepcopy__(self, memo: dict[int, Any]) -> FirstStepWatch:
        # panorama pipelines copy only the scheduler's `__dict__`, and put it back into the same scheduler
        if id(vars(self.scheduler)) in memo and id(self.scheduler) not in memo:
            return self
        memo[id(self)] = twin = copy.copy(self)
        twin.scheduler = copy.deepcopy(self.scheduler, memo)
        return twin


def _noise_rule(scheduler: Any) -> NoiseRule | None:
    """The scheduler's rule; None for a class from outside diffusers, or if `step` has been replaced."""
    if type(scheduler).__module__.split(".")[0] != "diffusers":
        return None
    if not isinstance(vars(scheduler).get("step"), FirstStepWatch | None):
        return None
    return SCHEDULERS.get(type(scheduler).__name__)


def _step_defaults(scheduler: Any) -> dict[str, Any]:
    step = getattr(type(scheduler), "step", None)
    parameters = inspect.signature(step).parameters.values() if step else ()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def _none(scheduler: Any, settings: Settings) -> str | None:
    return None


def _always(name: str) -> NoiseRule:
    def rule(scheduler: Any, settings: Settings) -> str | None:
        return None if settings.get("s_noise") == 0 else f"{name} adds noise at every step"

    return rule


def _tokens(name: str) -> NoiseRule:
    """Even without noise, always picking the likeliest token makes jumps that can't be forecast."""
    return lambda scheduler, settings: f"{name} draws tokens at every step"


def _eta(scheduler: Any, settings: Settings) -> str | None:
    adds = settings["eta"] > 0 and settings.get("s_noise") != 0
    return f"eta={settings['eta']:g} adds noise at every step" if adds else None


def _churn(scheduler: Any, settings: Settings) -> str | None:
    adds = settings["s_churn"] > 0 and settings["s_noise"] != 0
    return f"s_churn={settings['s_churn']:g} adds noise at every step" if adds else None


def _sde(scheduler: Any, settings: Settings) -> str | None:
    algorithm = settings["algorithm_type"]
    return f"{algorithm} adds noise at every step" if algorithm.startswith("sde-") else None


def _stochastic_sampling(scheduler: Any, settings: Settings) -> str | None:
    return "stochastic_sampling adds noise at every step" if settings.get("stochastic_sampling") else None


def _tau(scheduler: Any, settings: Settings) -> str | None:
    # checked at all training timesteps: those of the generation are on the device
    adds = any(scheduler.tau_func(time) > 0 for time in torch.arange(settings["num_train_timesteps"]))
    return "SA-Solver adds noise at every step with tau > 0" if adds else None


def _between_ode_limits(scheduler: Any, settings: Settings) -> str | None:
    adds = settings["t_lim_ode_below"] <= settings["t_lim_ode"]
    return "RFD4 adds noise at every step between its limits" if adds else None


# rules that depend on arguments of `step`, and the names of these arguments
STEP_RULES: dict[NoiseRule, set[str]] = {_eta: {"eta"}, _churn: {"s_churn", "s_noise"}}

# Keyed by class name, since not every version of diffusers has every class. (FlowMatchEuler takes `s_churn`,
# and CogVideoX DDIM and DPM take `eta`, but none of them uses it.)
SCHEDULERS: dict[str, NoiseRule] = {
    "AmusedScheduler": _tokens("Amused"),
    "BlockRefinementScheduler": _tokens("Block refinement"),
    "CMStochasticIterativeScheduler": _always("A consistency model"),
    "CogVideoXDDIMScheduler": _none,
    "CogVideoXDPMScheduler": _always("CogVideoX DPM"),
    "ConsistencyDecoderScheduler": _always("A consistency decoder"),
    "CosineDPMSolverMultistepScheduler": _always("Cosine DPM++ SDE"),
    "DDIMInverseScheduler": _none,
    "DDIMParallelScheduler": _eta,
    "DDIMScheduler": _eta,
    "DDPMParallelScheduler": _always("DDPM"),
    "DDPMScheduler": _always("DDPM"),
    "DDPMWuerstchenScheduler": _always("DDPM"),
    "DEISMultistepScheduler": _none,
    "DPMSolverMultistepInverseScheduler": _sde,
    "DPMSolverMultistepScheduler": _sde,
    "DPMSolverSDEScheduler": _always("DPM++ SDE"),
    "DPMSolverSinglestepScheduler": _sde,
    "DiscreteDDIMScheduler": _tokens("Discrete DDIM"),
    "EDMDPMSolverMultistepScheduler": _sde,
    "EDMEulerScheduler": _churn,
    "EntropyBoundScheduler": _tokens("Entropy bound"),
    "EulerAncestralDiscreteScheduler": _always("Euler ancestral"),
    "EulerDiscreteScheduler": _churn,
    "FlowMapEulerDiscreteScheduler": _none,
    "FlowMatchEulerDiscreteScheduler": _stochastic_sampling,
    "FlowMatchHeunDiscreteScheduler": _churn,
    "FlowMatchLCMScheduler": _always("LCM"),
    "HeliosDMDScheduler": _none,  # re-adds the initial noise, not fresh noise
    "HeliosScheduler": _none,
    "HeunDiscreteScheduler": _none,
    "IPNDMScheduler": _none,
    "KDPM2AncestralDiscreteScheduler": _always("KDPM2 ancestral"),
    "KDPM2DiscreteScheduler": _none,
    "KarrasVeScheduler": _churn,
    "LCMScheduler": _always("LCM"),
    "LMSDiscreteScheduler": _none,
    "LTXEulerAncestralRFScheduler": _eta,
    "MiniMaxH3Scheduler": _none,
    "PNDMScheduler": _none,
    "PiflowScheduler": _none,
    "RFD4ProteinaScheduler": _between_ode_limits,
    "RePaintScheduler": _always("RePaint"),
    "SASolverScheduler": _tau,
    "SCMScheduler": _always("SCM"),
    "ScoreSdeVeScheduler": _always("Score SDE-VE"),
    "ScoreSdeVpScheduler": _always("Score SDE-VP"),
    "TCDScheduler": _eta,
    "UnCLIPScheduler": _always("UnCLIP"),
    "UniPCMultistepScheduler": _none,
    "VQDiffusionScheduler": _tokens("VQ diffusion"),
}

# whether a solver calls the model between steps, too, by class name; others never do
BETWEEN_STEPS: dict[str, Callable[[Settings], bool]] = {
    "DPMSolverSDEScheduler": lambda settings: True,
    "DPMSolverSinglestepScheduler": lambda settings: settings["solver_order"] > 1,
    "FlowMatchHeunDiscreteScheduler": lambda settings: True,
    "HeunDiscreteScheduler": lambda settings: True,
    "KDPM2AncestralDiscreteScheduler": lambda settings: True,
    "KDPM2DiscreteScheduler": lambda settings: True,
    "KarrasVeScheduler": lambda settings: True,
    "PNDMScheduler": lambda settings: not settings["skip_prk_steps"],
    "ScoreSdeVeScheduler": lambda settings: settings["correct_steps"] > 0,
}
