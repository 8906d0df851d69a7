"""`tomadiff tune`: what it chooses, why, and that nothing that was drawn is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pipelines import denoiser, make
from tiny import build, tiny
from torch import nn

import tomadiff
from tomadiff import settings_file
from tomadiff.config import ResolvedConfig
from tomadiff.models import family_of
from tomadiff.tools import tune
from tomadiff.tools.cli import main
from tomadiff.tools.evaluate.job import REFERENCE, ImageGenerator
from tomadiff.tools.evaluate.pictures import open_picture
from tomadiff.tools.evaluate.store import read_rows
from tomadiff.tools.generate import Request, draw
from tomadiff.tools.loading import load

SMALL = [
    "tune",
    "--model",
    "emoji-unet",
    "--size",
    "32",
    "32",
    "--steps",
    "2",
    "--threads",
    "1",
    "--limit",
    "2",
]
BUDGET = {"psnr": 30.0}
FOLDER = Path("tuning/emoji-unet")  # where nothing else is asked for


def line(method: str, speedup: float | None, psnr: float, pictures: int = 8) -> dict[str, Any]:
    found = {"method": method, "ratio": 0.5, "speedup": speedup, "pictures": pictures, "psnr_worst": psnr - 1}
    return found | {"psnr": psnr, "ssim": psnr / 100}


def distance(a: Image.Image, b: Image.Image) -> float:
    """The mean difference of their colours, of 255."""
    return float(np.abs(np.array(a, dtype=float) - np.array(b, dtype=float)).mean())


LINES = [line("a", 1.2, 40), line("b", 1.5, 31), line("c", 1.9, 29), line("d", 1.01, 50), line("e", None, 45)]


def test_the_fastest_within_the_budget_is_chosen_with_reasons() -> None:
    best = tune.chosen(LINES, BUDGET, 8)
    assert best["method"] == "b"
    assert tune.chosen(LINES, {"psnr": 30.0, "ssim": 0.35}, 8)["method"] == "a", "both have to be met"
    chosen, faster = tune.reasons(LINES, BUDGET, best)
    assert (
        "b at 0.5 (1.50x, PSNR 31.000 dB" in chosen
        and "of 5 settings, the fastest that keeps PSNR 30" in chosen
    )
    assert "c at 0.5 (1.90x" in faster


def test_only_what_drew_every_picture_is_chosen() -> None:
    assert tune.chosen([line("a", 1.2, 40), line("b", 1.5, 35, pictures=2)], BUDGET, 8)["method"] == "a"


def test_what_was_faster_on_fewer_pictures_is_told() -> None:
    lines = [line("a", 1.2, 40), line("b", 1.5, 35, pictures=2), line("c", 1.6, 29, pictures=2)]
    _, untried, faster = tune.reasons(lines, BUDGET, tune.chosen(lines, BUDGET, 8))
    assert "but on 2 pictures only, is b at 0.5 (1.50x" in untried and "c at 0.5" in faster


def test_where_nothing_is_good_enough_it_says_what_came_closest() -> None:
    assert tune.chosen(LINES, {"psnr": 48.0}, 8) is None, "what saves 1% is not faster"
    (told,) = tune.reasons(LINES, {"psnr": 48.0}, None)
    assert "nothing that keeps PSNR 48 is faster than dense" in told and "d at 0.5 (1.01x" in told
    (told,) = tune.reasons(LINES, {"psnr": 60.0}, None)
    assert "nothing of 5 settings keeps PSNR 60; the closest is d at 0.5" in told


def test_the_better_half_goes_on_and_the_safest_with_it() -> None:
    lines = [dict(line("dense", 1.0, 0), ratio=0.0), *LINES, line("f", 1.4, 32), line("g", 1.3, 33)]
    assert (lines[0]["method"], lines[0]["ratio"]) == REFERENCE
    kept = [method for method, _ in tune.best_half(lines, BUDGET)]
    assert kept == ["b", "f", "g", "a"], "of those that gain, a is the closest"
    kept = [method for method, _ in tune.best_half(LINES[:4], BUDGET)]
    assert kept == ["b", "a"]


def test_settings_that_a_model_can_not_honour_are_no_candidates() -> None:
    def found(model: nn.Module) -> list[ResolvedConfig]:
        family = family_of(model)
        return [config.resolve(family) for config in tune.candidates(model, family)]

    assert any(config.ratio == {2: 0.75, 4: 0.25} for config in found(denoiser(make("sdxl"))))
    sd3, flux = (found(denoiser(make(name))) for name in ("sd3", "flux"))
    assert any(config.weigh_keys for config in sd3) and any(config.weigh_keys for config in flux)
    assert all(isinstance(config.ratio, float) for config in sd3), "one level only"
    assert len(flux) > 10
    sana = found(build(tiny("sana")))
    assert {config.where for config in sana} == {"module", "kv"}
    assert not any(config.weigh_keys for config in sana), "linear attention has no logits to add to"


def test_the_command_writes_settings_that_draw_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted once; then it goes on, and draws nothing twice but the prompt that was under way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "MIN_SPEEDUP", 0.0)  # times are anybody's guess here
    few = [tomadiff.Config(ratio=ratio) for ratio in (0.25, 0.5, {1: 0.5}, 0.75)]
    monkeypatch.setattr(tune, "candidates", lambda *_: few)
    drawn: list[tuple[str, str]] = []
    original, stop_at = ImageGenerator.draw, [6]  # dense and four in the first prompt, one in the second

    def counted(self: ImageGenerator, work: Any, contender: Any) -> Any:
        if len(drawn) == stop_at[0]:
            raise KeyboardInterrupt
        drawn.append((work.prompt, tune.label(*contender)))
        return original(self, work, contender)

    monkeypatch.setattr(ImageGenerator, "draw", counted)
    assert main([*SMALL, "--psnr", "25"]) == 130
    assert "continue with --resume" in capsys.readouterr().err and not (FOLDER / "settings.json").exists()
    assert main([*SMALL, "--psnr", "25"]) == 2
    assert "add --resume" in capsys.readouterr().err
    before, stop_at[0] = len(drawn), -1
    assert main([*SMALL, "--psnr", "25", "--resume"]) == 0
    first, second = dict.fromkeys(prompt for prompt, _ in drawn)
    assert {prompt for prompt, _ in drawn[before:]} == {second}, "the first was finished"
    assert "Chosen is tomadiff" in capsys.readouterr().out
    found = settings_file.load(FOLDER / "settings.json")
    assert found.notes["measured"]["psnr"] >= 25 and found.notes["measured"]["pictures"] == 2
    assert found.notes["budget"] == {"psnr": 25.0} and found.notes["model"] == "emoji-unet"
    assert found.notes["model class"] == "UNet2DConditionModel"
    pipe = tomadiff.apply(load("emoji-unet"), FOLDER / "settings.json")
    picture, _ = draw(pipe, Request(first, 0, 2, (32, 32)))
    pictures = [row for row in read_rows(FOLDER / "rows.jsonl") if row["prompt"] == first]
    # the nearest: weights at other addresses may round otherwise
    same = min(pictures, key=lambda row: distance(open_picture(FOLDER / row["file"]), picture))
    assert distance(open_picture(FOLDER / same["file"]), picture) < 1
    assert tune.configuration(same["method"], same["ratio"], family_of(pipe.unet)) == found.config


def test_steps_are_placed_by_calibration_and_written_as_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search that is resumed places them alike, and draws nothing that is there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "MIN_SPEEDUP", 0.0)
    usual = tune.candidates

    def placed(*args: Any) -> list[tomadiff.Config]:
        return [config for config in usual(*args) if isinstance(config.interval, tuple)]

    monkeypatch.setattr(tune, "candidates", placed)
    command = [*SMALL, "--steps", "8", "--limit", "1", "--psnr", "1"]
    assert main(command) == 0
    first = settings_file.load(FOLDER / "settings.json").config.interval
    assert first[0] == 0 and first[-1] == 7 and len(first) < 8
    pictures = read_rows(FOLDER / "rows.jsonl")
    assert main([*command, "--resume"]) == 0
    assert "everything is drawn already" in capsys.readouterr().err
    assert read_rows(FOLDER / "rows.jsonl") == pictures
    assert settings_file.load(FOLDER / "settings.json").config.interval == first


def test_a_budget_that_nothing_meets_writes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few = [tomadiff.Config(ratio=0.75), tomadiff.Config(ratio=0.5)]
    monkeypatch.setattr(tune, "candidates", lambda *_: few)
    assert main([*SMALL, "--psnr", "90", "--ssim", "0.9999"]) == 1
    told = capsys.readouterr().out
    assert "No settings are written: nothing of 2 settings keeps PSNR 90 and SSIM 0.9999" in told
    assert not (FOLDER / "settings.json").exists()
    assert json.loads((FOLDER / "job.json").read_text())["model"] == "emoji-unet"


def test_pictures_that_can_not_be_scored_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those that are smaller than the window of SSIM."""
    few = [tomadiff.Config(ratio=0.5)]
    monkeypatch.setattr(tune, "candidates", lambda *_: few)
    command = [*SMALL, "--size", "8", "8", "--psnr", "5", "--folder", str(tmp_path)]
    assert main(command) == 2
    assert "can't be scored by SSIM" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--psnr 35, or --ssim 0.95"),
        (["--psnr", "0"], "above 0"),
        (["--psnr", "100"], "below 100"),
        (["--ssim", "1"], "below 1"),
        (["--psnr", "30", "-o", "missing/x.json"], "can't write"),
        (["--psnr", "30", "-o", "."], "it is a folder"),
        (["--psnr", "30", "--limit", "0"], "at least 1"),
        (["--psnr", "30", "--prompts", "nobody"], "no prompts called"),
        (["--psnr", "30", "--prompts", "imagenet"], "words that the embedded model doesn't know"),
    ],
    ids=str,
)
def test_mistakes_are_told_at_once(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
