"""Train an embedded model: flow matching on the emoji, on one CPU core, resuming from its last checkpoint.

python scripts/train_emoji/train.py unet --out runs/unet --steps 3900 --window-steps 3000 --lr 1.2e-3
python scripts/train_emoji/train.py flux --out runs/flux --steps 2750 --window-steps 2150 --lr 1.5e-3
python scripts/train_emoji/train.py flux --out runs/flux --export src/tomadiff/tools/demo/models/flux
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from tomadiff.tools.demo.data import PROMPTS, load_emoji, to_latents
from tomadiff.tools.demo.pipelines import PIPELINES, WHOLE, EmojiPipeline, Window

WARMUP = 100  # steps
EMA_DECAY = 0.998
NO_TEXT = 0.05  # share of samples that lose their prompt, for guidance
T_MEAN, T_STD = 0.6, 1.3  # of logit(t), noisier than the usual (0, 1): layout is learnt there, and last
# Most of training is on windows of a quarter of the picture: they cost less than a quarter, since attention
# is quadratic, and teach what belongs where, since the models are told positions. The rest is on whole
# pictures.
WINDOW, WINDOW_BATCH = 16, 8


def random_window(size: int) -> Window:
    """A window of the latents, on the UNet's coarse grid; clamping makes borders as likely as the middle."""
    top, left = (2 * torch.randint(-2, (size - WINDOW) // 2 + 3, (2,))).clamp(0, size - WINDOW).tolist()
    return slice(top, top + WINDOW), slice(left, left + WINDOW)


class Trainer:
    """Everything that changes during training, as one state that can be saved and resumed."""

    def __init__(self, kind: str, steps: int, batch: int, lr: float, seed: int, window_steps: int) -> None:
        torch.manual_seed(seed)
        self.steps, self.batch, self.lr, self.step = steps, batch, lr, 0
        self.window_steps = window_steps
        self.pipe: EmojiPipeline = PIPELINES[kind].untrained()
        self.model = nn.ModuleList(
            c for c in self.pipe.components.values() if isinstance(c, nn.Module)
        ).train()
        self.model.to(memory_format=torch.channels_last)  # the UNet is 5% faster so on a CPU
        self.latents = to_latents(load_emoji())
        self.ids = self.pipe.text_encoder.tokenize(list(PROMPTS))
        self.queue = torch.empty(0, dtype=torch.long)
        self.ema = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr, betas=(0.9, 0.99), weight_decay=0.0)

    def loss(self) -> Tensor:
        windowed = self.step < self.window_steps
        noisy, t, ids, velocity = self.sample(WINDOW_BATCH if windowed else self.batch)
        window = random_window(noisy.shape[-1]) if windowed else WHOLE
        predicted = self.pipe.velocity(noisy, t, *self.pipe.text_encoder(ids), window)
        inside = (..., *window)
        return (predicted - velocity[inside]).square().mean()

    def sample(self, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A batch: x_t = (1 - t) x + t noise, t, words, and the velocity noise - x."""
        while len(self.queue) < batch:  # whole shuffled rounds, so that every emoji is seen equally often
            self.queue = torch.cat([self.queue, torch.randperm(len(PROMPTS))])
        chosen, self.queue = self.queue[:batch], self.queue[batch:]
        x, ids = self.latents[chosen], self.ids[chosen]
        ids = ids * (torch.rand(batch, 1) >= NO_TEXT)
        # One time out of each quantile of the distribution: with small batches, far less noise in the
        # gradient.
        quantiles = ((torch.arange(batch) + torch.rand(batch)) / batch).clamp(1e-4, 1 - 1e-4)
        t = torch.sigmoid(T_MEAN + T_STD * torch.special.ndtri(quantiles))
        noise = torch.randn_like(x)
        return torch.lerp(x, noise, t.view(-1, 1, 1, 1)), t, ids, noise - x

    def train_step(self) -> float:
        warm = min(1.0, (self.step + 1) / WARMUP)
        decay = 0.5 + 0.5 * math.cos(math.pi * min(1.0, self.step / self.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * warm * decay
        loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
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
            "optimizer": self.optimizer.state_dict(),
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
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])

    @torch.no_grad()
    def export(self, folder: Path) -> None:
        """Write the averaged weights as an fp16 pipeline."""
        for p, averaged in zip(self.model.parameters(), self.ema, strict=True):
            p.copy_(averaged)
        self.model.half()
        self.pipe.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=sorted(PIPELINES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=6000, help="length of the decay; may change on resuming")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--window-steps", type=int, default=0, help="train so long on windows, then on pictures"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes-per-checkpoint", type=float, default=3)
    parser.add_argument(
        "--export", type=Path, help="write the checkpoint as a pipeline to this folder; don't train"
    )
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    trainer = Trainer(args.kind, args.steps, args.batch, args.lr, args.seed, args.window_steps)
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
    while trainer.step < args.steps:
        losses.append(trainer.train_step())
        now = time.monotonic()
        if trainer.step % 50 == 0 or trainer.step == args.steps:
            loss, seconds = sum(losses) / len(losses), (now - logged) / len(losses)
            print(f"step {trainer.step}/{args.steps}  loss {loss:.4f}  {seconds:.2f} s/step", flush=True)
            losses, logged = [], now
        if now - saved > 60 * args.minutes_per_checkpoint or trainer.step == args.steps:
            trainer.save(checkpoint)
            saved = now


if __name__ == "__main__":
    main()
