"""Is a model well trained? Draw every prompt, measure which emoji each picture is nearest to, write a
contact sheet.

python scripts/train_emoji/evaluate.py src/tomadiff/tools/demo/models/unet --sheet unet.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from tomadiff.tools.demo.data import PROMPTS, SIZE, load_emoji
from tomadiff.tools.demo.pipelines import EmojiPipeline, load_pipeline


def draw(pipe: EmojiPipeline, prompts: list[str], steps: int, seed: int, batch: int = 8) -> Tensor:
    """One picture per prompt, [B, 3, 64, 64] in [0, 1]; its noise depends on `seed` and its place alone."""
    generators = [torch.Generator().manual_seed(1000 * seed + i) for i in range(len(prompts))]
    drawn = [
        pipe(
            prompts[i : i + batch],
            num_inference_steps=steps,
            generator=generators[i : i + batch],
            output_type="pt",
        )
        for i in range(0, len(prompts), batch)
    ]
    return torch.cat([d.images for d in drawn])


def nearest(pictures: Tensor, emoji: Tensor) -> Tensor:
    """[B] the index of the emoji that each picture is nearest to, by pixel L2."""
    return torch.cdist(pictures.flatten(1), emoji.flatten(1)).argmin(1)


def contact_sheet(rows: list[Tensor], columns: int = 12) -> Image.Image:
    """Each prompt as a column of pictures, one of each of `rows` [len(PROMPTS), 3, 64, 64], and its name."""
    cell = len(rows) * SIZE + 14
    sheet = Image.new("RGB", (columns * (SIZE + 8), -(-len(PROMPTS) // columns) * cell), "white")
    pen = ImageDraw.Draw(sheet)
    for i, prompt in enumerate(PROMPTS):
        x, y = i % columns * (SIZE + 8), i // columns * cell
        for j, row in enumerate(rows):
            pixels = (row[i].clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
            sheet.paste(Image.fromarray(pixels), (x + 4, y + j * SIZE))
        pen.text((x + 2, y + len(rows) * SIZE), prompt, fill="black", font_size=10)
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a saved pipeline")
    parser.add_argument(
        "--sheet", type=Path, help="write a contact sheet here: the emoji above, the drawings below"
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    pipe = load_pipeline(args.folder)
    pipe.set_progress_bar_config(disable=True)
    emoji = load_emoji() / 2 + 0.5
    rows = [emoji]
    for seed in range(args.seeds):
        pictures = draw(pipe, list(PROMPTS), args.steps, seed)
        found = nearest(pictures, emoji)
        right = found == torch.arange(len(PROMPTS))
        error = (pictures - emoji).square().mean((1, 2, 3))
        psnr = (-10 * error.log10()).mean()
        wrong = [f"{PROMPTS[i]} -> {PROMPTS[found[i]]}" for i in (~right).nonzero().flatten().tolist()]
        print(
            f"seed {seed}: {right.float().mean():.1%} nearest to their own emoji, mean PSNR {psnr:.1f} dB",
            *wrong,
        )
        rows.append(pictures)
    if args.sheet:
        contact_sheet(rows).save(args.sheet)


if __name__ == "__main__":
    main()
