"""Train an embedded model on the emoji scenes, resuming from its last checkpoint.

python -m train_demo.train flux --out runs/flux --steps 2400 --decay 450 --whole-every 6 \
    --whole-from 2250
python -m train_demo.train flux --out runs/flux --export src/tomadiff/tools/demo/models/flux
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from train_demo.data import Composer
from train_demo.optimizer import Muon
from train_demo.words import start_from_summaries

from tomadiff.tools.demo.codec import PatchCodec
from tomadiff.tools.demo.pipelines import PIPELINES, TRAIN_TIMESTEPS, WHOLE, EmojiPipeline, Window
from tomadiff.tools.demo.prompts import COLOURS, SCENES, Scene

WARMUP = 100  # steps
EMA_DECAY = 0.998
NO_TEXT = 0.1  # share of samples that lose their prompt, for guidance
NO_COLOUR = 0.1  # share of samples whose prompt doesn't name the background
# Most of training is on windows of a quarter of the picture: they cost less than a quarter, since attention
# is quadratic, and teach what belongs where, since the models are told positions. The rest is on whole
# pictures.
WINDOW = 16
FLOW_TIME_MEAN, FLOW_TIME_STD = 0.2, 1.4  # of logit(t)
PURE_NOISE_FROM = 900  # the timestep from which half of the samples are pure noise, as samplers start


def random_window(size: int) -> Window:
    """A window of the latents, on the UNet's coarse grid; clamping makes borders as likely as the middle."""
    top, left = (2 * torch.randint(-2, (size - WINDOW) // 2 + 3, (2,))).clamp(0, size - WINDOW).tolist()
    return slice(top, top + WINDOW), slice(left, left + WINDOW)


def stratified(count: int) -> Tensor:
    """[count] a uniform number from each of so many equal parts of [0, 1], for steadier losses."""
    return ((torch.arange(count) + torch.rand(count)) / count).clamp(1e-4, 1 - 1e-4)


def matrices_and_others(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weights inside blocks, for Muon; and embeddings, modulation, inputs, outputs, norms and biases."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        inside = "blocks." in name or "mid_block." in name
        modulation = "norm" in name or "time_emb_proj" in name
        (matrices if inside and p.ndim > 1 and not modulation else others).append(p)
    return matrices, others


class Trainer:
    """Everything that changes during training, as one state that can be saved and resumed.

    The learning rate is constant but for a warm-up and the last `decay` steps, so that more steps can be
    trained without starting anew: go on from a checkpoint before the decay.
    """

    def __init__(
        self,
        kind: str,
        steps: int,
        lr: float = 1.5e-3,
        seed: int = 0,
        batch: int = 16,
        whole_batch: int = 4,
        whole_every: int = 0,
        whole_from: int | None = None,
        decay: int = 0,
        muon: bool = True,
        **model_changes: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.steps, self.lr, self.decay, self.step = steps, lr, decay, 0
        self.batch, self.whole_batch = batch, whole_batch
        self.whole_every, self.whole_from = whole_every, steps if whole_from is None else whole_from
        self.composer = Composer()
        self.scenes = [scene for scene in SCENES if not scene.held_out]
        codec = PatchCodec.fitted(self.composer(self.scenes[::7]))
        self.pipe: EmojiPipeline = PIPELINES[kind].untrained(codec, **model_changes)
        start_from_summaries(self.pipe.text_encoder, self.composer)
        self.model = nn.ModuleList(
            c for c in self.pipe.components.values() if isinstance(c, nn.Module) and c is not codec
        ).train()
        self.model.to(memory_format=torch.channels_last)  # the UNet is 5% faster so on a CPU
        spread = codec.deviation[:, None, None]
        self.spread, self.channel_weight = spread, spread**2 / (spread**2).mean()
        self.words = self.pipe.text_encoder.tokenize([scene.prompt for scene in self.scenes])
        self.colour_words = self.pipe.text_encoder.tokenize(list(COLOURS))[:, 0]
        self.queue = torch.empty(0, dtype=torch.long)
        self.ema = [p.detach().clone() for p in self.model.parameters()]
        matrices, others = matrices_and_others(self.model)
        adam = torch.optim.AdamW(
            others if muon else self.model.parameters(), lr, betas=(0.9, 0.99), weight_decay=0.0
        )
        self.optimizers = [adam, Muon(matrices, lr)] if muon else [adam]

    def loss(self) -> Tensor:
        whole = self.on_whole_pictures()
        scenes, ids = self.samples(self.whole_batch if whole else self.batch)
        latents = self.pipe.codec.encode(self.composer(scenes))
        noisy, t, target = self.noised(latents)
        window = WHOLE if whole else random_window(latents.shape[-1])
        correction = self.pipe.noise_estimate(noisy, t, *self.pipe.text_encoder(ids), window)[1]
        return ((correction - target[(..., *window)]).square() * self.channel_weight).mean()

    def on_whole_pictures(self) -> bool:
        in_turn = self.whole_every > 0 and self.step % self.whole_every == self.whole_every - 1
        return in_turn or self.step >= self.whole_from

    def samples(self, count: int) -> tuple[list[Scene], Tensor]:
        """Scenes, and the words of their prompts."""
        while len(self.queue) < count:  # whole shuffled rounds, so that every scene is seen equally often
            self.queue = torch.cat([self.queue, torch.randperm(len(self.scenes))])
        chosen, self.queue = self.queue[:count], self.queue[count:]
        ids = self.words[chosen]
        no_colour = torch.isin(ids, self.colour_words) & (torch.rand(count, 1) < NO_COLOUR)
        ids = ids.masked_fill(no_colour | (torch.rand(count, 1) < NO_TEXT), 0)
        return [self.scenes[i] for i in chosen.tolist()], ids

    def noised(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Noisy latents, their times, and the correction that the model should give for them."""
        count, noise = len(latents), torch.randn_like(latents)
        if "unet" in self.pipe.components:
            t = (stratified(count) * TRAIN_TIMESTEPS).floor()
            pure = (t >= PURE_NOISE_FROM) & (torch.rand(count) < 0.5)
        else:
            t = torch.sigmoid(FLOW_TIME_MEAN + FLOW_TIME_STD * torch.special.ndtri(stratified(count)))
            pure = torch.zeros(count, dtype=torch.bool)
        a, s, pure = (x.view(-1, 1, 1, 1) for x in (*self.pipe.signal_and_noise(t), pure))
        noisy = torch.where(pure, noise, a * latents + s * noise)
        noise = (noisy - a * latents) / s
        deviation = torch.hypot(a * self.spread, s)
        return noisy, t, (a * self.spread * noise - s / self.spread * latents) / deviation

    def train_step(self) -> float:
        warm = min(1.0, (self.step + 1) / WARMUP)
        left = min(1.0, (self.steps - self.step) / self.decay) if self.decay else 1.0
        loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * warm * left
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            keep = min(EMA_DECAY, (1 + self.step) / (10 + self.step))
            torch._foreach_lerp_(self.ema, list(self.model.parameters()), 1 - keep)
        self.step += 1
        return loss.item()

    def save(self, path: Path) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "ema": self.ema,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "queue": self.queue,
            "rng": torch.get_rng_state(),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)  # atomic: an interruption leaves the previous checkpoint

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.step, self.ema, self.queue = state["step"], state["ema"], state["queue"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(state["rng"])

    @torch.no_grad()
    def use_averaged_weights(self) -> EmojiPipeline:
        """The pipeline, with the averaged weights in place of those in training."""
        for p, averaged in zip(self.model.parameters(), self.ema, strict=True):
            p.copy_(averaged)
        self.model.eval()
        return self.pipe

    def export(self, folder: Path) -> None:
        """Write the averaged weights as an fp16 pipeline."""
        pipe = self.use_averaged_weights()
        pipe.to(torch.float16)
        pipe.save_pretrained(folder)


def wait_while_paused(pause_file: Path | None) -> float:
    """Sleep as long as the file exists; returns the seconds slept."""
    start = time.monotonic()
    while pause_file is not None and pause_file.exists():
        time.sleep(1)
    return time.monotonic() - start


def add_training_arguments(parser: argparse.ArgumentParser, lr: float) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--until", type=int, help="stop at this step, to go on another time")
    parser.add_argument("--decay", type=int, default=0, help="steps in which the learning rate falls to 0")
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--whole-batch", type=int, default=4, help="whole pictures per step")
    parser.add_argument("--whole-every", type=int, default=0, help="one step in N is on whole pictures")
    parser.add_argument("--whole-from", type=int, help="from this step on, all are on whole pictures")
    parser.add_argument("--adam", action="store_true", help="no Muon")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes-per-checkpoint", type=float, default=3)
    parser.add_argument("--pause-file", type=Path, help="sleep while this file exists")
    parser.add_argument(
        "--export", type=Path, help="write the checkpoint as a pipeline to this folder; don't train"
    )


def run(args: argparse.Namespace, make: Callable[..., Trainer]) -> None:
    """Train, or export, what `make` makes of the settings in `args`."""
    torch.set_num_threads(args.threads)
    taken = ("steps", "lr", "seed", "batch", "whole_batch", "whole_every", "whole_from", "decay")
    trainer = make(**{name: getattr(args, name) for name in taken}, muon=not args.adam)
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out / "state.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
        print(f"resumed at step {trainer.step}", flush=True)
    if args.export:
        trainer.export(args.export)
        return

    saved = logged = time.monotonic()
    losses: list[float] = []
    last = args.steps if args.until is None else min(args.until, args.steps)
    while trainer.step < last:
        logged += wait_while_paused(args.pause_file)
        if trainer.step == args.steps - args.decay:
            trainer.save(args.out / "before-decay.pt")
        losses.append(trainer.train_step())
        now = time.monotonic()
        if trainer.step % 25 == 0 or trainer.step == last:
            loss, seconds = sum(losses) / len(losses), (now - logged) / len(losses)
            left = (last - trainer.step) * seconds / 60
            print(
                f"{time.strftime('%H:%M:%S')}  step {trainer.step}/{args.steps}  loss {loss:.4f}  "
                f"{seconds:.2f} s/step  {left:.0f} minutes left",
                flush=True,
            )
            losses, logged = [], now
        if now - saved > 60 * args.minutes_per_checkpoint or trainer.step == last:
            trainer.save(checkpoint)
            saved = now


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=sorted(PIPELINES))
    add_training_arguments(parser, lr=1.5e-3)
    args = parser.parse_args()
    run(args, lambda **settings: Trainer(args.kind, **settings))


if __name__ == "__main__":
    main()
