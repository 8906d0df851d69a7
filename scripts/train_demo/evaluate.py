"""Is a model well trained? Draw scenes that it saw and scenes that were held out, measure which of all
scenes each picture is nearest to, and write contact sheets.

python -m train_demo.evaluate src/tomadiff/tools/demo/models/flux --sheets flux
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor
from train_demo.data import Composer

from tomadiff.tools.demo.pipelines import SIZE, EmojiPipeline
from tomadiff.tools.demo.prompts import PLACEMENTS, SCENES, THINGS, Scene
from tomadiff.tools.loading import load


def choose(wanted: Callable[[Scene], bool]) -> list[Scene]:
    """For each thing one of the wanted scenes, if there is any; colours and placements take turns."""
    chosen = []
    for thing in range(len(THINGS)):
        scenes = [scene for scene in SCENES if scene.thing == thing and wanted(scene)]
        if scenes:
            chosen.append(scenes[5 * thing % len(scenes)])
    return chosen


def new_placement(scene: Scene) -> bool:
    return scene.held_out and scene.thing % 8 == 5 and PLACEMENTS[scene.placement] == "right"


GROUPS: dict[str, Callable[[Scene], bool]] = {
    "seen": lambda scene: not scene.held_out,
    "new-colour": lambda scene: scene.held_out and not new_placement(scene),
    "new-placement": new_placement,
}


def draw(pipe: EmojiPipeline, prompts: list[str], seed: int, batch: int = 8, **options: float) -> Tensor:
    """One picture per prompt, [B, 3, 128, 128] in [0, 1]; noise depends on `seed` and place in the list."""
    generators = [torch.Generator().manual_seed(1000 * seed + i) for i in range(len(prompts))]
    drawn = []
    for i in range(0, len(prompts), batch):
        some = slice(i, i + batch)
        drawn.append(pipe(prompts[some], generator=generators[some], output_type="pt", **options).images)
    return torch.cat(drawn)


def reduced(pictures: Tensor) -> Tensor:
    return F.avg_pool2d(pictures, 2).flatten(1)


def nearest(pictures: Tensor, scenes: list[Scene], composer: Composer) -> list[Scene]:
    """The one of `scenes` that each picture is nearest to, by L2 at half the resolution."""
    drawn, parts = reduced(pictures), []
    for i in range(0, len(scenes), 96):
        parts.append(torch.cdist(drawn, reduced(composer(scenes[i : i + 96]) / 2 + 0.5)))
    return [scenes[i] for i in torch.cat(parts, 1).argmin(1).tolist()]


def contact_sheet(scenes: list[Scene], rows: list[Tensor], columns: int = 12) -> Image.Image:
    """Each scene as a column of pictures, one of each of `rows` [N, 3, 128, 128], and its prompt."""
    cell = len(rows) * SIZE + 26  # two lines of text
    lines = -(-len(scenes) // columns)
    columns = -(-len(scenes) // lines)  # as few as fill these lines
    sheet = Image.new("RGB", (columns * (SIZE + 6), lines * cell), "white")
    pen = ImageDraw.Draw(sheet)
    for i, scene in enumerate(scenes):
        x, y = i % columns * (SIZE + 6), i // columns * cell
        for j, row in enumerate(rows):
            pixels = (row[i].clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
            sheet.paste(Image.fromarray(pixels), (x + 3, y + j * SIZE))
        label = "\n".join(textwrap.wrap(scene.prompt, 28))
        pen.text((x + 3, y + len(rows) * SIZE + 2), label, fill="black", font_size=9, spacing=1)
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a saved pipeline")
    parser.add_argument(
        "--sheets", type=Path, help="write contact sheets NAME-*.png: true above, drawn below"
    )
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--every", type=int, default=1, help="only every Nth scene of a group")
    parser.add_argument("--steps", type=int, help="default: the pipeline's own")
    parser.add_argument("--guidance", type=float, nargs="+", help="default: the pipeline's own")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    pipe = load(str(args.folder))
    pipe.set_progress_bar_config(disable=True)
    composer = Composer()
    for group in args.groups:
        scenes = choose(GROUPS[group])[:: args.every]
        prompts = [scene.prompt for scene in scenes]
        true = composer(scenes) / 2 + 0.5
        rows = [true]
        for guidance in args.guidance or [pipe.config.default_guidance]:
            for seed in range(args.seeds):
                options = {"num_inference_steps": args.steps, "guidance_scale": guidance}
                pictures = draw(pipe, prompts, seed, **options)
                rows.append(pictures)
                found = nearest(pictures, SCENES, composer)
                right = sum(a == b for a, b in zip(found, scenes)) / len(scenes)
                things = sum(a.thing == b.thing for a, b in zip(found, scenes)) / len(scenes)
                psnr = -10 * (pictures - true).square().mean((1, 2, 3)).log10().mean()
                wrong = [f"{b.prompt} -> {a.prompt}" for a, b in zip(found, scenes) if a != b]
                print(
                    f"{group}, guidance {guidance}, seed {seed}: of {len(scenes)} pictures, {right:.1%} are "
                    f"nearest to their own of all {len(SCENES)} scenes, {things:.1%} to the right one of "
                    f"{len(THINGS)} things; PSNR {psnr:.1f} dB. {'; '.join(wrong)}",
                    flush=True,
                )
        if args.sheets:
            contact_sheet(scenes, rows).save(f"{args.sheets}-{group}.png")


if __name__ == "__main__":
    main()
