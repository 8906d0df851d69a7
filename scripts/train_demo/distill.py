"""Distil a trained flow-matching model for few steps without guidance, resuming from the last checkpoint.

The student learns to make one large step where its teacher, guided, makes several small ones (progressive
distillation, in a single stage).

python -m train_demo.distill src/tomadiff/tools/demo/models/flux --out runs/fast --steps 640 --decay 240 \
    --whole-every 6 --whole-from 600 --lr 4e-4
python -m train_demo.distill src/tomadiff/tools/demo/models/flux --out runs/fast --export fast
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_demo.train import WHOLE, Trainer, add_training_arguments, random_window, run

from tomadiff.tools.demo.pipelines import EmojiFluxPipeline
from tomadiff.tools.loading import load


class Distiller(Trainer):
    def __init__(
        self,
        teacher: EmojiFluxPipeline,
        student_steps: int = 4,
        substeps: int = 3,
        guidance: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__("flux", **settings)
        self.teacher, self.substeps = teacher, substeps
        self.guidance = teacher.config.default_guidance if guidance is None else guidance
        self.pipe.transformer.load_state_dict(teacher.transformer.state_dict())
        self.pipe.text_encoder.load_state_dict(teacher.text_encoder.state_dict())
        self.pipe.register_to_config(default_steps=student_steps, default_guidance=1.0)
        self.ema = [p.detach().clone() for p in self.model.parameters()]
        self.pipe.set_timesteps(student_steps, torch.device("cpu"))
        self.times = self.pipe.scheduler.sigmas  # [student_steps + 1], from 1 to 0

    def loss(self) -> Tensor:
        whole = self.on_whole_pictures()
        scenes, ids = self.samples(self.whole_batch if whole else self.batch)
        latents = self.pipe.codec.encode(self.composer(scenes))
        window = WHOLE if whole else random_window(latents.shape[-1])
        step = torch.randperm(len(latents)) % (len(self.times) - 1)
        start, end = self.times[step], self.times[step + 1]
        t = start.view(-1, 1, 1, 1)
        noisy = torch.lerp(latents, torch.randn_like(latents), t)
        seen = (..., *window)
        moved = self.teacher_moves(noisy, start, end, ids, window)
        velocity = (moved - noisy)[seen] / (end - start).view(-1, 1, 1, 1)
        scaled, correction, deviation = self.pipe.noise_estimate(
            noisy, start, *self.pipe.text_encoder(ids), window
        )
        target = (velocity * deviation - (t - (1 - t) * self.spread**2) * scaled) / self.spread
        return ((correction - target).square() * self.channel_weight).mean()

    @torch.no_grad()
    def teacher_moves(self, noisy: Tensor, start: Tensor, end: Tensor, ids: Tensor, window: Any) -> Tensor:
        """`noisy` of times `start`, its window moved to times `end` in equal guided steps."""
        text = self.teacher.text_encoder(torch.cat([ids, torch.zeros_like(ids)]))
        latents, seen = noisy.clone(), (..., *window)
        for k in range(self.substeps):
            t = torch.lerp(start, end, k / self.substeps)
            velocity = self.teacher.velocity(torch.cat([latents, latents]), torch.cat([t, t]), *text, window)
            with_text, without = velocity.chunk(2)
            velocity = without + self.guidance * (with_text - without)
            latents[seen] += velocity * ((end - start) / self.substeps).view(-1, 1, 1, 1)
        return latents


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher", type=Path, help="a saved pipeline")
    parser.add_argument("--student-steps", type=int, default=4)
    parser.add_argument("--substeps", type=int, default=3, help="the teacher's, for one of the student's")
    parser.add_argument("--guidance", type=float, help="the teacher's; by default what it has by default")
    add_training_arguments(parser, lr=5e-4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    teacher = load(str(args.teacher))
    own = {"student_steps": args.student_steps, "substeps": args.substeps, "guidance": args.guidance}
    run(args, lambda **settings: Distiller(teacher, **own, **settings))


if __name__ == "__main__":
    main()
