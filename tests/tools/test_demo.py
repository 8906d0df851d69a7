"""The embedded models draw, offline, and merging leaves their pictures what they are."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pipelines import whole_pipeline
from train_demo.data import Composer
from train_demo.evaluate import draw, nearest

import tomadiff
from tomadiff.tools import cli, commands
from tomadiff.tools.demo import true_size
from tomadiff.tools.demo.embedded import EMBEDDED, FOLDER, MERGING, load_embedded
from tomadiff.tools.demo.pipelines import EmojiPipeline
from tomadiff.tools.demo.prompts import SCENES, THINGS
from tomadiff.tools.evaluate.metrics import psnr
from tomadiff.tools.generate import Request, save
from tomadiff.tools.generate import draw as draw_request
from tomadiff.tools.loading import load

SAMPLE = [scene for scene in SCENES if not scene.held_out][::800]
HELD_OUT = [scene for scene in SCENES if scene.held_out][::200]
STEPS = 4
# mean PSNR to the dense pictures that merging half of the tokens must keep, on the sample
KEPT_PSNR = {"emoji-unet": 30.0, "emoji-flux": 28.0}


@pytest.fixture(scope="module", params=EMBEDDED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pipe(name: str) -> EmojiPipeline:
    pipe = load_embedded(name)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def dense(pipe: EmojiPipeline) -> torch.Tensor:
    return draw(pipe, [scene.prompt for scene in SAMPLE], seed=0, num_inference_steps=STEPS)


def test_models_are_small_and_saved_in_half_precision(name: str) -> None:
    files = [path for path in (FOLDER / name.removeprefix("emoji-")).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 14e6
    assert (FOLDER / name.removeprefix("emoji-") / "model_index.json") in files


def test_pictures_are_nearest_to_their_own_of_all_scenes(pipe: EmojiPipeline, dense: torch.Tensor) -> None:
    """Also those of combinations that training never showed."""
    new = draw(pipe, [scene.prompt for scene in HELD_OUT], seed=0, num_inference_steps=STEPS)
    assert nearest(torch.cat([dense, new]), SCENES, Composer()) == [*SAMPLE, *HELD_OUT]


def test_merging_half_of_the_tokens_keeps_the_pictures(
    name: str, pipe: EmojiPipeline, dense: torch.Tensor
) -> None:
    with tomadiff.merged(pipe, **MERGING):
        merged = draw(pipe, [scene.prompt for scene in SAMPLE], seed=0, num_inference_steps=STEPS)
        finest = max(tomadiff.report(pipe).sites, key=lambda site: site.tokens)
    assert (finest.tokens, finest.kept) == (1024, 512)
    assert psnr(dense, merged).mean() > KEPT_PSNR[name]


def test_a_prompt_is_read_word_by_word(pipe: EmojiPipeline) -> None:
    def picture(prompt: str) -> np.ndarray:
        return np.asarray(draw_request(pipe, Request(prompt, seed=3, steps=2, size=(32, 64)))[0])

    assert (picture("hot dog") == picture("A hot dog!")).all()
    assert (picture("hot dog") != picture("dog")).any()


def test_an_unknown_word_is_an_error_with_near_names_and_all_that_work(pipe: EmojiPipeline) -> None:
    with pytest.raises(ValueError, match=r"'piza' \(near: pizza") as error:
        pipe("a piza")
    assert str(error.value).endswith(", ".join(THINGS))
    with pytest.raises(ValueError, match=r"'xyz'\. It draws one thing, perhaps on the left or right"):
        pipe("xyz")


def test_other_sizes_and_dtypes_work(name: str) -> None:
    pipe = load(name, dtype="fp16")
    pipe.set_progress_bar_config(disable=True)
    tomadiff.apply(pipe, ratio=0.5)
    picture, _ = draw_request(pipe, Request("fox", steps=2, size=(48, 80)))
    assert picture.size == (80, 48)


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    class Broken:
        def save(self, path: Path, *args, **kwargs) -> None:
            path.write_bytes(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save(Broken(), tmp_path / "out.png", {})
    assert list(tmp_path.iterdir()) == []


# -- the command ------------------------------------------------------------------------------------------


def tomadiff_command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As if typed in this folder; in this process, since a new one takes seconds to import torch."""
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = cli.main([*arguments])
    except SystemExit as ended:  # of argparse
        code = ended.code
    finally:
        os.chdir(before)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def test_generate_writes_a_picture_with_its_settings_inside(tmp_path: Path) -> None:
    done = tomadiff_command(
        *("generate", "hot dog", "--steps", "3", "--seed", "1", "-o", "x.png"),
        *("--size", "32", "64", "--guidance", "2.5"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.size == (64, 32)
        settings = json.loads(picture.text["tomadiff"])
    assert settings["prompt"] == "hot dog" and settings["seed"] == 1
    assert (settings["steps"], settings["size"], settings["guidance"]) == (3, [32, 64], 2.5)
    assert settings["tomadiff"]["interval"] == "auto"


def test_generate_compares_and_numbers_pictures(tmp_path: Path) -> None:
    done = tomadiff_command(
        *("generate", "fox", "--steps", "2", "--compare", "--num-images", "2", "--ratio", "0.75"),
        *("--model", "emoji-flux", "--shift", "-o", "fox.png"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fox-1.png", "fox-2.png"]
    assert len(re.findall(r"dense [\d.]+ s: [\d.]+x; PSNR to the dense picture \d+\.\d dB", done.stdout)) == 2
    with Image.open(tmp_path / "fox-1.png") as picture:
        assert picture.size[0] > 128


def test_merge_map_draws_first_middle_and_last_step(tmp_path: Path) -> None:
    done = tomadiff_command("merge-map", "pizza", "--steps", "5", "-o", "map.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "map.png") as picture:
        assert picture.size[0] > 3 * 512


def test_any_pipeline_in_a_folder_is_a_model_too(tmp_path: Path) -> None:
    model = ("--model", str(whole_pipeline(tmp_path)), "--steps", "2", "--size", "128", "128")
    done = tomadiff_command("generate", "fox", *model, "--compare", "-o", "x.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = tomadiff_command("merge-map", "fox", *model, "-o", "map.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("x.png", "map.png"):
        Image.open(tmp_path / name).load()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["generate", "hot dog", "--model", "no/such-model"],
            "'no/such-model': no folder, no hub id",
        ),
        (["generate", "hot dog", "--model", "."], "can't load '.': no pipeline in this folder"),
        (["generate", "hot dog", "--method", "ideal"], "invalid choice: 'ideal'"),
        (["generate", "hot dog", "--ratio", "1.5"], "below 1"),
        (["generate", "hot dog", "--device", "abacus"], "can't use device 'abacus'"),
        (["generate", "hot dog", "--size", "63", "64"], "multiples"),
        (["generate", "hot dog", "-o", "missing/x.png"], "can't write"),
        (["generate", "hot dog", "-o", "x.jpg"], "must be a .png"),
        (["generate", "hto dgo"], "hot"),
        (["generate", "hot dog", "--num-images", "0"], "at least 1"),
        (["generate", "hot dog", "--steps", "0"], "steps"),
        (["merge-map", "hot dog", "--regions", "stripe"], "tile"),
        (
            ["merge-map", "fox", "--steps", "4", "--at", "4", "1", "--ratio", "[(2, 0.5)]"],
            "step 1 is dense; merged are 3, 4",
        ),
        (["demo", "--prompts", "hto"], "hot"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_gets_one_clear_line_and_code_2(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = tomadiff_command(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "fox", "--model", "all.safetensors"], "it is a single file, and a folder is needed"),
        (
            ["generate", "fox", "--model", "newer"],
            "this diffusers has no such class",
        ),
        (["generate", "fox", "--model", "list"], "no pipeline in this folder"),
        (["generate", "fox", "--device", "meta"], "can't use device 'meta'"),
        (["generate", "fox", "--seed", str(2**64 - 1), "--num-images", "2"], "64 bits"),
        (["generate", "fox", "--size", "8000000", "8000000"], "out of memory: take a smaller size"),
        (["merge-map", "fox", "--at", "0"], "step 0 is none of the steps"),
        (["merge-map", "fox", "--steps", "2", "--at", "3"], "step 3 is none of 2"),
        (["merge-map", "fox", "--steps", "1", "--ratio", "0"], "is merged: give --ratio 0.5"),
        (["inspect", "DiTTransformer2DModel", "--depth", "-1"], "--depth -1 must be at least 0"),
        (["inspect", "emoji-unet", "--depth", "2"], "--depth is for classes"),
        (["inspect", "DiTTransformer2DModel", "--size", "8", "8"], "--size is for pipelines"),
        (["demo", "--prompts", "fox", "hto"], "hot"),
        (["demo", "--steps", "0"], "at least 1"),
        (["demo", "--out", "all.safetensors"], "is no folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_told_before_anything_is_drawn(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("all.safetensors").write_bytes(b"weights")
    for name, index in {"newer": '{"_class_name": "NewerPipeline"}', "list": "[]"}.items():
        Path(name).mkdir()
        Path(name, "model_index.json").write_text(index)
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert says in shown.err and not shown.out and not list(tmp_path.rglob("*.png"))


def test_what_a_model_can_not_honour_is_told_before_a_dense_picture_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "draw", lambda *_: pytest.fail("something was drawn"))
    output = str(tmp_path / "x.png")
    assert cli.main(["generate", "fox", "--compare", "--dense-blocks", "50", "-o", output]) == 2
    assert "beyond dense_blocks=50" in capsys.readouterr().err


@pytest.mark.parametrize("guidance", ["nan", "inf", "much"])
def test_guidance_is_a_finite_number(guidance: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", "fox"], ["eval"], ["bench"], ["tune", "--psnr", "30"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main([*command, "--guidance", guidance])
        assert f"'{guidance}' is no finite number" in capsys.readouterr().err


def test_interrupting_keeps_finished_pictures_and_no_half_ones(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tomadiff.tools.cli",
            "generate",
            "fox",
            *("--steps", "6", "--size", "32", "32", "--num-images", "200"),
        ],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs us may ignore it
    )
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("out-*.png")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130 and "interrupted" in errors
    finished = list(tmp_path.iterdir())
    assert finished and all(path.name.startswith("out-") for path in finished)
    for path in finished:
        Image.open(path).load()


def test_the_demo_writes_its_pictures(tmp_path: Path) -> None:
    done = tomadiff_command("demo", "--steps", "2", "--prompts", "fox", "--out", "here", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    names = {f"{name}{suffix}.png" for name in EMBEDDED for suffix in ("", "-merge-map")}
    assert {path.name for path in (tmp_path / "here").iterdir()} == names
    assert "work left" in done.stdout and "speed-up" in done.stdout and "SSIM" in done.stdout
    assert re.search(r"A transformer block of SDXL at its true size .*: \d+\.\d\dx$", done.stdout.strip())


def test_the_demo_says_so_where_a_block_of_true_size_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(true_size, "SIDE", 10**6)  # petabytes of tokens
    request = ("demo", "--models", "emoji-unet", "--steps", "1", "--prompts", "fox")
    done = tomadiff_command(*request, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "speed-up" in done.stdout and (tmp_path / "demo" / "emoji-unet.png").exists()
    assert done.stdout.strip().endswith("does not fit in the free memory")


def test_another_error_in_the_block_of_true_size_is_no_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(true_size, "TEXT_CHANNELS", -1)
    with pytest.raises(RuntimeError, match="negative"):
        true_size.speedup_of_a_block()
