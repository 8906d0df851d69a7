"""Training of the embedded models repeats from its seed and resumes to the bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
)
from train_demo import train, words
from train_demo.data import Composer
from train_demo.distill import Distiller
from train_demo.evaluate import nearest
from train_demo.train import Trainer

from tomadiff.tools.demo.codec import PatchCodec
from tomadiff.tools.demo.pipelines import (
    PIPELINES,
    EmojiFluxPipeline,
    EmojiPipeline,
    EmojiUNetPipeline,
)
from tomadiff.tools.demo.prompts import COLOURS, PLACEMENTS, SCENES, THINGS
from tomadiff.tools.loading import load

TINY = {
    "unet": {
        "block_out_channels": (16, 16),
        "transformer_layers_per_block": (1, 1),
        "attention_head_dim": 1,
    },
    "flux": {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 1},
}


@pytest.fixture(scope="module", autouse=True)
def prepared_once() -> Iterator[None]:
    """What every trainer makes of the pictures of things before it begins: it is the same for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "Composer", functools.cache(Composer))
        patch.setattr(words, "summaries", functools.cache(words.summaries))
        yield


def trainer(kind: str, seed: int) -> Trainer:
    """Two steps on windows, then two on whole pictures, smaller and smaller."""
    return Trainer(kind, steps=4, seed=seed, batch=2, whole_batch=1, whole_from=2, decay=2, **TINY[kind])


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.flatten() for p in trainer.ema])


@pytest.mark.parametrize("kind", PIPELINES)
def test_training_repeats_from_its_seed_and_resumes_to_the_bit(kind: str, tmp_path: Path) -> None:
    straight = trainer(kind, 0)
    start = weights(straight).clone()
    for _ in range(4):
        straight.train_step()
    broken = trainer(kind, 0)
    for _ in range(2):
        broken.train_step()
    broken.save(tmp_path / "state.pt")
    resumed = trainer(kind, 1)
    resumed.load(tmp_path / "state.pt")
    for _ in range(2):
        resumed.train_step()
    assert torch.equal(weights(straight), weights(resumed))
    assert not torch.equal(weights(straight), start)


@pytest.mark.parametrize("kind", PIPELINES)
def test_an_exported_pipeline_loads_and_draws(kind: str, tmp_path: Path) -> None:
    trainer(kind, 0).export(tmp_path / "pipe")
    pipe = load(str(tmp_path / "pipe"))
    pipe.set_progress_bar_config(disable=True)
    (picture,) = pipe("a fox on the left, on blue", num_inference_steps=2).images
    assert picture.size == (128, 128)


def test_distillation_repeats_from_its_seed() -> None:
    def distilled(seed: int) -> torch.Tensor:
        teacher = trainer("flux", 0).pipe
        settings = {"steps": 2, "seed": seed, "batch": 2, "whole_batch": 1, "whole_from": 1}
        student = Distiller(teacher, **settings, **TINY["flux"])
        for _ in range(2):
            student.train_step()
        return weights(student)

    once = distilled(0)
    assert torch.equal(distilled(0), once)
    assert not torch.equal(distilled(1), once)


def test_the_codec_loses_nothing() -> None:
    pictures = Composer()(SCENES[::100])
    codec = PatchCodec.fitted(pictures)
    latents = codec.encode(pictures)
    assert torch.allclose(codec.decode(latents), pictures, atol=1e-5)
    assert torch.allclose(latents.std((0, 2, 3)), codec.deviation, rtol=0.01)


def perfect(kind: str) -> tuple[EmojiPipeline, torch.Tensor]:
    """A pipeline whose model knows the one picture that it is asked for, and that picture."""
    picture = Composer()(SCENES[50:51])
    codec = PatchCodec.fitted(Composer()(SCENES[::100]))
    pipe = PIPELINES[kind].untrained(codec, **TINY[kind])
    pipe.set_progress_bar_config(disable=True)
    latents, spread = codec.encode(picture), codec.deviation[:, None, None]

    def correction(scaled: torch.Tensor, t: torch.Tensor, *_: object) -> torch.Tensor:
        a, s = (share.view(-1, 1, 1, 1) for share in pipe.signal_and_noise(t))
        deviation = torch.hypot(a * spread, s)
        noise = (scaled * deviation - a * latents) / s
        return (a * spread * noise - s / spread * latents) / deviation

    pipe.correction = correction
    return pipe, picture / 2 + 0.5


def test_a_perfect_flow_model_draws_its_picture() -> None:
    pipe, picture = perfect("flux")
    assert isinstance(pipe, EmojiFluxPipeline)
    (drawn,) = pipe("fox", num_inference_steps=4, output_type="pt").images
    assert torch.allclose(drawn, picture[0], atol=1e-3)


@pytest.mark.parametrize(
    "scheduler",
    [
        EulerDiscreteScheduler,
        EulerAncestralDiscreteScheduler,
        DPMSolverMultistepScheduler,
        LCMScheduler,
        DDIMScheduler,
    ],
)
def test_a_perfect_epsilon_model_draws_its_picture_with_any_scheduler(scheduler: type) -> None:
    pipe, picture = perfect("unet")
    assert isinstance(pipe, EmojiUNetPipeline)
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    generator = torch.Generator().manual_seed(0)
    (drawn,) = pipe("fox", num_inference_steps=8, generator=generator, output_type="pt").images
    assert (drawn - picture[0]).abs().mean() < 0.02


def test_scenes_are_told_apart_and_some_are_held_out() -> None:
    composer = Composer()
    some = SCENES[::40]
    assert nearest(composer(some) / 2 + 0.5, SCENES, composer) == some
    assert len(SCENES) == len(THINGS) * len(COLOURS) * len(PLACEMENTS)
    assert 0.1 < sum(scene.held_out for scene in SCENES) / len(SCENES) < 0.2
    words = {frozenset(scene.prompt.split()) for scene in SCENES}
    assert len(words) == len(SCENES)  # whatever the order of its words, a prompt means one scene
