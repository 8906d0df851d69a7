"""What a model's output says about the clean image.

A model sees a noisy x = signal * image + noise_level * noise. Whether it predicts the noise, a velocity or a
flow, its output is

    of_input * x + of_image * image

with two factors for each step, which the scheduler knows. So an output can be turned into the image that the
model expects, and back. That image changes less from step to step than the output does, and hardly changes
with fresh noise, which is in x. So it is the image that is forecast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Schedulers for models that predict what `prediction_type` says, from x with a variance of 1, or else a flow.
# Tests run every one of them. Others' outputs are forecast as they are: solvers that call the model between
# steps, and those with tables of their own.
DIFFUSION = (
    *("CogVideoXDDIM", "CogVideoXDPM", "DDIM", "DDIMParallel", "DDPM", "DDPMParallel", "DEISMultistep"),
    *("DPMSolverMultistep", "EulerAncestralDiscrete", "EulerDiscrete", "LCM", "LMSDiscrete", "PNDM"),
    *("SASolver", "TCD", "UniPCMultistep"),
)
FLOW_MATCHING = ("FlowMatchEulerDiscrete", "FlowMatchLCM", "LTXEulerAncestralRF")
LEAST = 1e-4  # of signal and noise, by which is divided


class Terms(NamedTuple):
    """At one step, output = of_input * x + of_image * image. A number each, or one for each channel."""

    of_input: Tensor
    of_image: Tensor


@dataclass(frozen=True)
class Prediction:
    """The terms of all steps of a scheduler's table."""

    of_input: Tensor  # [steps, ...]
    of_image: Tensor  # [steps, ...]

    def at(self, index: int) -> Terms | None:
        """The terms at an entry of the table; None beyond its end."""
        return Terms(self.of_input[index], self.of_image[index]) if index < len(self.of_input) else None


class NoisyInput:
    """The input of one call: turns outputs into clean images, and back. Without terms, it changes nothing."""

    def __init__(self, sample: Any = None, terms: Terms | None = None) -> None:
        self._sample, self._terms = sample, terms

    @property
    def known(self) -> bool:
        """Whether outputs are known to stand for clean images."""
        return self._terms is not None

    def image(self, index: int, output: Tensor) -> Tensor:
        """The clean image that one of the outputs, in fp32, stands for."""
        if self._terms is None or (x := self._part(index, output)) is None:
            return output
        return (output - self._terms.of_input * x) / self._terms.of_image

    def output(self, index: int, image: Tensor) -> Tensor:
        """The output that stands for this clean image."""
        if self._terms is None or (x := self._part(index, image)) is None:
            return image
        return self._terms.of_input * x + self._terms.of_image * image

    def _part(self, index: int, like: Tensor) -> Tensor | None:
        """The noisy image of an output's shape. Masks and other conditions may follow it, along one axis."""
        parts = tree_leaves(self._sample)  # some models take a list of images
        x = parts[index] if index < len(parts) else None
        if not isinstance(x, Tensor) or x.ndim != like.ndim:
            return None
        longer = [axis for axis in range(x.ndim) if x.shape[axis] != like.shape[axis]]
        if len(longer) > 1 or any(x.shape[axis] < like.shape[axis] for axis in longer):
            return None
        for axis in longer:
            x = x.narrow(axis, 0, like.shape[axis])
        return x.float()


def prediction_of(pipeline: Any, scheduler: Any, sign: int = 1) -> Prediction | None:
    """The terms of a pipeline's model; None where nobody knows them.

    sign: -1 if the pipeline negates the model's output for its scheduler, 0 if it does something else to it.
    A pipeline whose model sees or predicts something else may have a method `output_terms(timesteps)`.
    """
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None:
        return None
    if hasattr(pipeline, "output_terms"):
        return Prediction(*pipeline.output_terms(timesteps))
    kind = prediction_type(scheduler)
    if kind is None or not sign:
        return None
    signal, noise = (share.clamp(min=LEAST) for share in _signal_and_noise(scheduler, kind))
    if kind == "epsilon":
        of_input, of_image = 1 / noise, -signal / noise
    elif kind == "v_prediction":
        of_input, of_image = signal / noise, -1 / noise
    elif kind == "flow":
        of_input, of_image = 1 / noise, -1 / noise
        sign = -sign if scheduler.config.get("invert_sigmas") else sign
    else:
        of_input, of_image = torch.zeros_like(signal), torch.ones_like(signal)
    return Prediction(sign * of_input, sign * of_image)


def prediction_type(scheduler: Any) -> str | None:
    """What a scheduler takes the model's output for; None where it is not known how that is related to x."""
    name = type(scheduler).__name__.removesuffix("Scheduler")
    if name in FLOW_MATCHING:
        return "flow"
    if name not in DIFFUSION:
        return None
    if scheduler.config.get("use_flow_sigmas"):
        return "flow"
    known = ("epsilon", "v_prediction", "sample")
    return next((kind for kind in known if kind == scheduler.config.get("prediction_type")), None)


def _signal_and_noise(scheduler: Any, kind: str) -> tuple[Tensor, Tensor]:
    """The shares of image and noise in what the model sees, for all entries of the scheduler's table."""
    timesteps, sigmas = scheduler.timesteps, getattr(scheduler, "sigmas", None)
    if sigmas is None:
        # a copy: on a GPU, reading single entries would wait for it
        signal_power = scheduler.alphas_cumprod.to(timesteps.device)[timesteps.long()].float()
        return signal_power.sqrt(), (1 - signal_power).sqrt()
    sigmas = sigmas[: len(timesteps)].float()
    if kind == "flow":
        noise = 1 - sigmas if scheduler.config.get("invert_sigmas") else sigmas
        return 1 - noise, noise
    signal = (1 + sigmas.square()).rsqrt()  # sigma is noise / signal
    return signal, sigmas * signal
