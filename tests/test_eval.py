"""The evaluation: nothing lost, nothing twice, nothing believed that is not intact; in process or on Ray."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tomadiff.cli import main
from tomadiff.quality.engines import local
from tomadiff.quality.job import REFERENCE, Drawing, Job, decode, encode
from tomadiff.quality.store import Store, append, read_rows, slug
from tomadiff.quality.summary import cases, pareto, summarise, table, worst_tenth

WAYS = (REFERENCE, ("tomadiff", 0.5), ("tomesd", 0.5))
JOB = Job("emoji-unet", WAYS, steps=2, size=(32, 32), threads=1)
PROMPTS = ["pizza", "hot dog"]
SMALL = [
    "--model",
    "emoji-unet",
    "--prompts",
    "embedded",
    "--steps",
    "2",
    "--size",
    "32",
    "32",
    "--threads",
    "1",
]


def drawing(number: int = 0, seed: int = 0, way: str = "dense", ratio: float = 0.0, grey: int = 9) -> Drawing:
    picture = Image.new("RGB", (8, 8), (grey, grey, grey))
    return Drawing(number, PROMPTS[number], seed, way, ratio, 0.5, encode(picture))


def fill(store: Store, prompts: list[str] = PROMPTS, seeds: tuple[int, ...] = (0, 1)) -> None:
    for made in local.run(store.job, store.missing(prompts, seeds)):
        store.add(made)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a folder, without what differs from run to run."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in read_rows(folder / "rows.jsonl")]
    return sorted(rows, key=lambda row: (row["number"], row["seed"], row["way"], row["ratio"]))


# -- the folder --------------------------------------------------------------------------------------------


def test_pictures_come_back_as_they_were_drawn() -> None:
    picture = Image.effect_noise((12, 8), 50).convert("RGB")
    assert decode(encode(picture)).shape == (3, 8, 12)
    assert (decode(encode(picture)).permute(1, 2, 0) * 255).round().byte().flatten().tolist() == list(
        picture.tobytes()
    )


def test_every_prompt_and_seed_is_drawn_in_every_way_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "out", JOB, resume=False)
    works = store.missing(PROMPTS, (0, 1))
    assert len(works) == 4 and all(work.ways == WAYS for work in works)
    fill(store)
    assert store.missing(PROMPTS, (0, 1)) == []
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 4 * 3
    for row in rows:
        content = (tmp_path / "out" / row["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == row["sha256"]
    # the same noise, other pictures
    assert len({row["sha256"] for row in rows}) == len(rows)


def test_the_same_evaluation_draws_the_same_pictures_again(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        fill(Store(tmp_path / folder, JOB, resume=False))
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")


@pytest.mark.parametrize("damage", ["gone", "cut", "changed", "empty"])
def test_a_damaged_picture_is_drawn_again_and_the_others_are_not(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "out"
    fill(Store(folder, JOB, resume=False))
    before = rows_of(folder)
    victim = folder / before[4]["file"]
    if damage == "gone":
        victim.unlink()
    else:
        content = victim.read_bytes()
        new = {"cut": content[:-9], "changed": content[:-9] + b"x" + content[-8:], "empty": b""}[damage]
        victim.write_bytes(new)
    store = Store(folder, JOB, resume=True)
    assert store.damaged == [before[4]["file"]]
    (work,) = store.missing(PROMPTS, (0, 1))
    assert work.ways == ((before[4]["way"], before[4]["ratio"]),)
    fill(store)
    assert rows_of(folder) == before


def test_half_a_row_at_the_end_is_no_row(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    store = Store(folder, JOB, resume=False)
    store.add(drawing(0))
    store.add(drawing(1))
    rows = folder / "rows.jsonl"
    rows.write_bytes(rows.read_bytes()[:-20])
    again = Store(folder, JOB, resume=True)
    assert list(again.rows) == [(0, 0, "dense", 0.0)]
    again.add(drawing(1))
    assert len(read_rows(rows)) == 2


def test_a_picture_without_its_row_is_not_trusted(tmp_path: Path) -> None:
    store = Store(tmp_path, JOB, resume=False)
    store.add(drawing(0))
    (tmp_path / "rows.jsonl").unlink()
    assert Store(tmp_path, JOB, resume=True).rows == {}


def test_a_folder_is_not_mixed_with_another_evaluation(tmp_path: Path) -> None:
    Store(tmp_path, JOB, resume=False)
    with pytest.raises(ValueError, match="--resume"):
        Store(tmp_path, JOB, resume=False)
    with pytest.raises(ValueError, match="steps was 2"):
        Store(tmp_path, Job("emoji-unet", WAYS, steps=3, size=(32, 32), threads=1), resume=True)
    # another way may be added
    more = Job("emoji-unet", (*WAYS, ("tome", 0.25)), steps=2, size=(32, 32), threads=1)
    assert len(Store(tmp_path, more, resume=True).missing(["pizza"], (0,))[0].ways) == 4


def test_another_prompt_of_the_same_number_is_drawn_anew(tmp_path: Path) -> None:
    store = Store(tmp_path, JOB, resume=False)
    store.add(drawing(0))
    (work,) = store.missing(["hot dog"], (0,))
    assert REFERENCE in work.ways


def test_names_of_folders_are_distinct() -> None:
    names = ["tomadiff:a=1,b=2 at 0.5", "tomadiff:a=1-b=2 at 0.5", "tomadiff at 0.5", "../x"]
    slugs = [slug(name) for name in names]
    assert len(set(slugs)) == 4 and all("/" not in s and not s.startswith(".") for s in slugs)


# -- the summary -------------------------------------------------------------------------------------------


def test_the_summary_has_means_worst_tenths_and_paired_speedups() -> None:
    rows = []
    for number in range(20):
        pace = 1 + number  # the machine gets slower, which must not show
        rows.append({"number": number, "seed": 0, "way": "dense", "ratio": 0.0, "seconds": 2.0 * pace})
        rows.append(
            {
                "number": number,
                "seed": 0,
                "way": "tomadiff",
                "ratio": 0.5,
                "seconds": 1.0 * pace,
                "psnr": 20.0 + number,
            }
        )
    dense, merged = summarise(rows, [REFERENCE, ("tomadiff", 0.5)], {"tomadiff at 0.5": {"fid": 3.0}})
    assert merged["speedup"] == 2.0 and merged["psnr"] == 29.5 and merged["psnr_worst"] == 20.5
    assert dense["speedup"] == 1.0 and "psnr" not in dense and merged["fid"] == 3.0
    text = table([dense, merged], {"clip": "get it so"})
    assert "29.5 (20.5)" in text and "not available" in text and "get it so" in text


def test_worst_is_at_the_right_end() -> None:
    assert worst_tenth(range(10), higher_is_better=True) == 0
    assert worst_tenth(range(10), higher_is_better=False) == 9


def test_the_front_is_what_nothing_beats() -> None:
    points = [(1.0, 30.0), (1.5, 25.0), (1.4, 24.0), (2.0, 20.0), (1.2, 31.0)]
    assert pareto(points, higher_is_better=True) == [(1.2, 31.0), (1.5, 25.0), (2.0, 20.0)]
    assert pareto([(1.0, 0.1), (2.0, 0.05)], higher_is_better=False) == [(2.0, 0.05)]


def test_cases_show_the_best_the_median_and_the_worst() -> None:
    rows = []
    for number, value in enumerate((10.0, 30.0, 20.0)):
        common = {"number": number, "seed": 0, "seconds": 1.0, "prompt": f"p{number}"}
        rows.append({**common, "way": "dense", "ratio": 0.0})
        rows.append({**common, "way": "tomadiff", "ratio": 0.5, "psnr": value})
    asked: list[int] = []

    def read(row: dict[str, Any]) -> Image.Image:
        asked.append(row["number"])
        return Image.new("RGB", (16, 16))

    assert cases(rows, [REFERENCE, ("tomadiff", 0.5)], read).width > 200
    assert asked == [1, 1, 2, 2, 0, 0]


# -- killed in the middle ----------------------------------------------------------------------------------


def test_after_kill_9_everything_finished_is_kept_and_the_rest_is_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    methods = ["--methods", "tomadiff", "tome", "--metrics", "psnr"]
    command = ["eval", *SMALL, "--limit", "6", *methods]
    process = subprocess.Popen(
        [sys.executable, "-m", "tomadiff.cli", *command, "-o", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    deadline = time.monotonic() + 60
    while len(read_rows(folder / "rows.jsonl")) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {row["file"]: row for row in read_rows(folder / "rows.jsonl")}
    assert 4 <= len(kept) < 18
    assert main([*command, "-o", str(folder), "--resume"]) == 0
    rows = read_rows(folder / "rows.jsonl")
    assert len(rows) == 18 == len({row["file"] for row in rows})
    assert all(row == kept[row["file"]] for row in rows if row["file"] in kept), "not drawn again"
    assert json.loads((folder / "summary.json").read_text())["lines"]


def test_append_is_durable_line_by_line(tmp_path: Path) -> None:
    for number in range(3):
        append(tmp_path / "rows.jsonl", {"number": number})
        assert [row["number"] for row in read_rows(tmp_path / "rows.jsonl")] == list(range(number + 1))


# -- the command -------------------------------------------------------------------------------------------


def evaluate(folder: Path, *more: str) -> int:
    return main(["eval", *SMALL, "--limit", "3", "-o", str(folder), *more])


def test_the_command_writes_everything_into_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, real: None
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    methods = ["--methods", "tomadiff", "todo", "tomesd", "--ratio", "0.5", "0.75"]
    assert evaluate(tmp_path / "out", *methods) == 0
    printed = capsys.readouterr()
    assert "| tomadiff | 0.5 |" in printed.out and "todo at 0.5 is left out" in printed.err
    # what is not there is no number
    assert "CLIP-T is not available" in printed.out and "DINO is not available" in printed.out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    merged = next(line for line in summary["lines"] if line["way"] == "tomadiff" and line["ratio"] == 0.5)
    assert merged["pictures"] == 3 and merged["speedup"] > 0 and merged["seconds"] > 0
    assert 5 < merged["psnr"] < 60 and 0 < merged["ssim"] < 1 and merged["lpips"] > 0 and merged["fid"] > 0
    assert "clip" not in merged and "dino" not in merged
    for name in ("pareto.png", "cases.png"):
        with Image.open(tmp_path / "out" / name) as picture:
            assert picture.width > 300


def test_scores_are_kept_and_new_metrics_are_added_to_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(tmp_path, "--metrics", "psnr") == 0
    first = read_rows(tmp_path / "scores.jsonl")
    assert evaluate(tmp_path, "--metrics", "psnr", "--resume") == 0
    assert "everything is drawn already" in capsys.readouterr().err
    assert read_rows(tmp_path / "scores.jsonl") == first
    assert evaluate(tmp_path, "--metrics", "psnr", "ssim", "--resume") == 0
    both = read_rows(tmp_path / "scores.jsonl")[len(first) :]
    assert [row["psnr"] for row in both] == [row["psnr"] for row in first] and all(
        "ssim" in row for row in both
    )


def test_dense_pictures_are_never_scored_against_themselves(tmp_path: Path) -> None:
    assert evaluate(tmp_path, "--metrics", "psnr") == 0
    dense, merged = json.loads((tmp_path / "summary.json").read_text())["lines"]
    assert "psnr" not in dense and "psnr" in merged


def test_caches_of_diffusers_are_ways_too(tmp_path: Path) -> None:
    flux = ["eval", "--model", "emoji-flux", "--limit", "1", "--steps", "6", "--size", "32", "32"]
    ways = ["first-block:threshold=0.5", "first-block:threshold=0.5+tomadiff", "tomadiff"]
    assert main([*flux, "--metrics", "psnr", "--methods", *ways, "-o", str(tmp_path)]) == 0
    lines = {line["way"]: line for line in json.loads((tmp_path / "summary.json").read_text())["lines"]}
    assert lines[ways[0]]["ratio"] == 0 and lines[ways[1]]["ratio"] == 0.5
    assert lines[ways[1]]["psnr"] < lines[ways[0]]["psnr"] < 100


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seeds", "0"], "at least 1"),
        (["--methods", "tomata"], "unknown method"),
        (["--methods", "first-block"], "no caches for"),
        (["--methods", "todo"], "whole factors"),
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        (["--workers", "2"], "for --engine ray"),
        (["--device", "cuda:9"], "can't use device"),
        (["--model", "no/such"], "can't load"),
    ],
    ids=str,
)
def test_mistakes_are_told_before_anything_is_drawn(
    tmp_path: Path,
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert evaluate(tmp_path / "out", *arguments) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_paper_protocol_is_three_thousand_pictures() -> None:
    from argparse import ArgumentParser

    from tomadiff.quality import command
    from tomadiff.quality.prompts import load_prompts

    parser = ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["--protocol", "paper"])
    command.settle(args)
    assert len(load_prompts(args.prompts, args.limit)) * args.seeds == 3000
    assert {"fid", "clip", "dino"} <= set(args.metrics) and args.ratio == [0.25, 0.5, 0.75]
    args = parser.parse_args(["--protocol", "ablation", "--model", "some/model"])
    command.settle(args)
    assert len(load_prompts(args.prompts, args.limit)) * args.seeds == 150


def test_an_interrupt_leaves_a_summary_of_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a prompt, of which only the dense picture is there."""
    finished = local.run

    def interrupted(job: Job, works: list[Any]) -> Any:
        for count, drawing in enumerate(finished(job, works)):
            if count == 3:
                raise KeyboardInterrupt
            yield drawing

    monkeypatch.setattr(local, "run", interrupted)
    assert evaluate(tmp_path, "--metrics", "psnr") == 130
    assert "--resume goes on" in capsys.readouterr().err
    assert len(read_rows(tmp_path / "rows.jsonl")) == 3 and (tmp_path / "cases.png").exists()
    monkeypatch.undo()
    assert evaluate(tmp_path, "--metrics", "psnr", "--resume") == 0
    assert len(read_rows(tmp_path / "rows.jsonl")) == 6


def test_scores_of_another_model_are_other_scores() -> None:
    from tomadiff.quality.scores import Wanted

    assert Wanted(["clip"], clip_model="a").name_of("clip") != Wanted(["clip"], clip_model="b").name_of(
        "clip"
    )
