"""Denoising loops for every scheduler of diffusers, each as its pipeline has it, around a fixed function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

VOCABULARY, MASK = 11, 10  # tokens of discrete schedulers; the last one is "masked"


@dataclass(frozen=True)
class Case:
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)  # of `scheduler.step`

    def __str__(self) -> str:
        settings = self.config | self.arguments
        words = [f"{key}={getattr(value, '__name__', value)}" for key, value in settings.items()]
        return "-".join([self.name, *words])

    def scheduler(self) -> Any:
        """A new one. Some need packages that diffusers does without, and some are newer than others."""
        if not hasattr(diffusers.schedulers, self.name):
            pytest.skip(f"diffusers {diffusers.__version__} has no {self.name}")
        try:
            return getattr(diffusers.schedulers, self.name)(**self.config)
        except ImportError as missing:
            pytest.skip(str(missing).strip())


class Loop:
    """One generation. `seed(step)` is what random numbers start from in that step."""

    steps = 8

    def __init__(self, case: Case, seed: Callable[[int], int]) -> None:
        self.scheduler, self.arguments, self.seed = case.scheduler(), case.arguments, seed
        self.times = self.set_times()
        self.calls = 0  # of the model

    def start(self) -> Tensor:
        noise = torch.randn(1, 8, 3, generator=torch.Generator().manual_seed(0))
        return noise * getattr(self.scheduler, "init_noise_sigma", 1.0)

    def set_times(self) -> Tensor:
        self.scheduler.set_timesteps(self.steps)
        return self.scheduler.timesteps

    def begin_at(self, step: int) -> None:
        """As if the steps before had not been."""
        if hasattr(self.scheduler, "_step_index"):
            self.scheduler._step_index = step

    def path(self) -> list[Tensor]:
        """The sample before the first step, and after each."""
        samples = [self.start()]
        for step in range(len(self.times)):
            samples.append(self.one_step(step, samples[-1]))
        return samples

    def one_step(self, step: int, sample: Tensor) -> Tensor:
        if hasattr(self.scheduler, "noise_sampler"):  # draws the noise of all steps in the first one
            self.scheduler.noise_sampler = None
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed(step))
            generator = torch.Generator().manual_seed(self.seed(step))
            return self.advance(step, self.times[step], sample, generator)

    def advance(self, step: int, time: Tensor, sample: Tensor, generator: torch.Generator) -> Tensor:
        scaled = sample
        if hasattr(self.scheduler, "scale_model_input"):
            scaled = self.scheduler.scale_model_input(sample, time)
        return self.step_by(self.model(scaled, time), time, sample, generator)

    def step_by(self, output: Tensor, time: Any, sample: Tensor, generator: Any, **more: Any) -> Tensor:
        if "generator" in inspect.signature(self.scheduler.step).parameters:
            more["generator"] = generator
        return self.scheduler.step(output, time, sample, return_dict=False, **more, **self.arguments)[0]

    def model(self, sample: Tensor, time: Any) -> Tensor:
        self.calls += 1
        return torch.tanh(sample.roll(1, -1)) * (0.5 + 0.3 * torch.cos(torch.as_tensor(time) / 300)).float()


class CogVideoXDPM(Loop):
    before: tuple[Tensor | None, Tensor | None] = (None, None)

    def advance(self, step: int, time: Tensor, sample: Tensor, generator: torch.Generator) -> Tensor:
        clean, earlier = self.before
        output = self.model(sample, time)
        result, clean = self.scheduler.step(
            output, clean, time, earlier, sample, generator=generator, **self.arguments
        )
        self.before = clean, time
        return result


class ConsistencyDecoder(Loop):
    steps = 2


class Helios(Loop):
    def start(self) -> Tensor:
        return super().start()[..., None, None]  # a video


class HeliosDMD(Helios):
    def advance(self, step: int, time: Tensor, sample: Tensor, generator: torch.Generator) -> Tensor:
        return self.step_by(
            self.model(sample, time),
            time,
            sample,
            generator,
            cur_sampling_step=step,
            dmd_noisy_tensor=self.start(),
            dmd_sigmas=self.scheduler.sigmas,
            dmd_timesteps=self.scheduler.timesteps,
            all_timesteps=self.scheduler.timesteps,
        )


class KarrasVe(Loop):
    def advance(self, step: int, time: Tensor, sample: Tensor, generator: torch.Generator) -> Tensor:
        sigma, after = (self.scheduler.schedule[at] if at >= 0 else 0.0 for at in (int(time), int(time) - 1))
        noisy, sigma_hat = self.scheduler.add_noise_to_input(sample, sigma, generator)
        result = self.scheduler.step(self.model(noisy, sigma_hat), sigma_hat, after, noisy)
        if after == 0:
            return result.prev_sample
        return self.scheduler.step_correct(
            self.model(result.prev_sample, after),
            sigma_hat,
            after,
            noisy,
            result.prev_sample,
            result["derivative"],
        ).prev_sample


class Piflow(Loop):
    def model(self, sample: Tensor, time: Any) -> Tensor:
        return super().model(sample, time).repeat(1, 1, self.scheduler.n_grid)


class PNDM(Loop):
    def begin_at(self, step: int) -> None:
        if not self.scheduler.config.skip_prk_steps:
            self.scheduler.counter = step


class RePaint(Loop):
    def set_times(self) -> Tensor:
        self.scheduler.set_timesteps(self.steps, jump_length=1, jump_n_sample=1)
        return self.scheduler.timesteps

    def step_by(self, output: Tensor, time: Any, sample: Tensor, generator: Any, **more: Any) -> Tensor:
        mask = torch.ones_like(sample)
        mask[..., 1:] = 0.0
        more |= {"original_image": torch.zeros_like(sample), "mask": mask}
        return super().step_by(output, time, sample, generator, **more)


class RFD4Proteina(Loop):
    def step_by(self, output: Tensor, time: Any, sample: Tensor, generator: Any, **more: Any) -> Tensor:
        return super().step_by(output, time, sample, generator, emit_mask=torch.ones(1, 8))


class ScoreSdeVe(Loop):
    def set_times(self) -> Tensor:
        self.scheduler.set_timesteps(self.steps)
        self.scheduler.set_sigmas(self.steps)
        return self.scheduler.timesteps

    def advance(self, step: int, time: Tensor, sample: Tensor, generator: torch.Generator) -> Tensor:
        for _ in range(self.scheduler.config.correct_steps):
            sample = self.scheduler.step_correct(self.model(sample, time), sample, generator).prev_sample
        output, time = self.model(sample, time), time.expand(1)
        return self.scheduler.step_pred(output, time, sample, generator).prev_sample


class ScoreSdeVp(Loop):
    def advance(self, step: int, time: Tensor, sample: Tensor, generator: torch.Generator) -> Tensor:
        return self.scheduler.step_pred(self.model(sample, time), sample, time, generator)[0]


class SCM(Loop):
    def set_times(self) -> Tensor:
        self.scheduler.set_timesteps(self.steps, intermediate_timesteps=None)
        return self.scheduler.timesteps[:-1]


class Wuerstchen(Loop):
    def set_times(self) -> Tensor:
        return super().set_times()[:-1, None]


class Tokens(Loop):
    """The sample is a row of tokens, and the model's output are logits."""

    def start(self) -> Tensor:
        return torch.full((1, 32), MASK)

    def model(self, sample: Tensor, time: Any) -> Tensor:
        self.calls += 1
        table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        return table[sample] + table[sample.roll(1, -1)]

    def step_by(self, output: Tensor, time: Any, sample: Tensor, generator: Any, **more: Any) -> Tensor:
        return super().step_by(output, int(time), sample, generator, **more)


class BlockRefinement(Tokens):
    def set_times(self) -> Tensor:
        return super().set_times().flip(0)  # its pipelines count upwards


class VQDiffusion(Tokens):
    def model(self, sample: Tensor, time: Any) -> Tensor:
        return super().model(sample, time)[..., :MASK].log_softmax(-1).transpose(1, 2)

    def step_by(self, output: Tensor, time: Any, sample: Tensor, generator: Any, **more: Any) -> Tensor:
        return super().step_by(output, torch.tensor(int(time)), sample, generator)


LOOPS: dict[str, type[Loop]] = {
    "AmusedScheduler": Tokens,
    "BlockRefinementScheduler": BlockRefinement,
    "CogVideoXDPMScheduler": CogVideoXDPM,
    "ConsistencyDecoderScheduler": ConsistencyDecoder,
    "DDPMWuerstchenScheduler": Wuerstchen,
    "DiscreteDDIMScheduler": Tokens,
    "EntropyBoundScheduler": Tokens,
    "HeliosDMDScheduler": HeliosDMD,
    "HeliosScheduler": Helios,
    "KarrasVeScheduler": KarrasVe,
    "PNDMScheduler": PNDM,
    "PiflowScheduler": Piflow,
    "RFD4ProteinaScheduler": RFD4Proteina,
    "RePaintScheduler": RePaint,
    "SCMScheduler": SCM,
    "ScoreSdeVeScheduler": ScoreSdeVe,
    "ScoreSdeVpScheduler": ScoreSdeVp,
    "VQDiffusionScheduler": VQDiffusion,
}


def loop(case: Case, seed: Callable[[int], int]) -> Loop:
    return LOOPS.get(case.name, Loop)(case, seed)


def draws_tokens(case: Case) -> bool:
    return issubclass(LOOPS.get(case.name, Loop), Tokens)
