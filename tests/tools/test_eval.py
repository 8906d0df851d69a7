"""The evaluation: nothing lost, nothing twice, nothing believed that is not intact; in process or on Ray."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emoji import load_emoji
from evaluations import CONTENDERS, JOB, PROMPTS, SMALL, fill, lines_of, rows_of, same_pictures
from PIL import Image

from tomadiff.methods import METHODS
from tomadiff.models import FAMILIES
from tomadiff.tools.cli import main
from tomadiff.tools.evaluate.command import draw_all
from tomadiff.tools.evaluate.curves import curves
from tomadiff.tools.evaluate.engines import local
from tomadiff.tools.evaluate.features import Inception
from tomadiff.tools.evaluate.job import REFERENCE, Drawing, Job, encode
from tomadiff.tools.evaluate.metrics import Statistics
from tomadiff.tools.evaluate.pictures import open_picture
from tomadiff.tools.evaluate.resolved import resolved
from tomadiff.tools.evaluate.scores import MetricOptions, load_metrics, score
from tomadiff.tools.evaluate.store import Store, append, folder_for, read_rows, slug
from tomadiff.tools.evaluate.summary import cases, pareto, pareto_plot, summarise, table, worst_tenth


def drawing(prompt: str = "pizza") -> Drawing:
    return Drawing(prompt, 0, *REFERENCE, 0.5, "somebody", encode(Image.new("RGB", (8, 8))))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all pictures, to be looked at and copied."""
    folder = tmp_path_factory.mktemp("evaluation") / "out"
    store = Store(folder, JOB, resume=False)
    fill(store)
    assert store.missing(PROMPTS, (0, 1)) == []
    return folder


# -- the folder --------------------------------------------------------------------------------------------


def test_pictures_come_back_as_they_were_drawn(tmp_path: Path) -> None:
    picture = Image.effect_noise((12, 8), 50).convert("RGB")
    (tmp_path / "x.png").write_bytes(encode(picture))
    assert open_picture(tmp_path / "x.png").tobytes() == picture.tobytes()


def test_prompts_in_the_progress_do_not_reach_the_terminal_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path / "out", JOB, resume=False)
    draw_all(store, store.missing(["pizza"], (0,)), iter([drawing("\x1b]0;evil\x07")]))
    shown = capsys.readouterr().err
    assert "evil" in shown and "\x1b" not in shown and "\x07" not in shown


def test_every_prompt_and_seed_is_drawn_in_every_way_once(tmp_path: Path, finished: Path) -> None:
    store = Store(tmp_path / "out", JOB, resume=False)
    works = store.missing(PROMPTS, (0, 1))
    assert len(works) == 4
    # there and back, so that times don't depend on who is before
    assert [work.contenders for work in works] == [CONTENDERS, CONTENDERS[::-1], CONTENDERS, CONTENDERS[::-1]]
    rows = read_rows(finished / "rows.jsonl")
    assert len(rows) == 4 * 3
    for row in rows:
        content = (finished / row["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == row["sha256"]
    # the same noise, other pictures
    assert len({row["sha256"] for row in rows}) == len(rows)


def test_the_same_evaluation_draws_the_same_pictures_again(tmp_path: Path, finished: Path) -> None:
    fill(Store(tmp_path / "out", JOB, resume=False))
    assert same_pictures(tmp_path / "out", finished)


@pytest.mark.parametrize("damage", ["gone", "cut", "changed", "empty"])
def test_a_damaged_picture_is_drawn_again_and_the_others_are_not(
    tmp_path: Path, finished: Path, damage: str
) -> None:
    folder = shutil.copytree(finished, tmp_path / "out")
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
    assert work.contenders == ((before[4]["method"], before[4]["ratio"]),)
    fill(store)
    assert rows_of(folder) == before


def test_half_a_row_at_the_end_is_no_row(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    store = Store(folder, JOB, resume=False)
    store.add(drawing("pizza"))
    store.add(drawing("hot dog"))
    rows = folder / "rows.jsonl"
    rows.write_bytes(rows.read_bytes()[:-20])
    again = Store(folder, JOB, resume=True)
    assert list(again.rows) == [("pizza", 0, "dense", 0.0)]
    again.add(drawing("hot dog"))
    assert len(read_rows(rows)) == 2


def test_a_picture_without_its_row_is_not_trusted(tmp_path: Path) -> None:
    store = Store(tmp_path, JOB, resume=False)
    store.add(drawing())
    (tmp_path / "rows.jsonl").unlink()
    assert Store(tmp_path, JOB, resume=True).rows == {}


def test_a_folder_is_not_mixed_with_another_evaluation(tmp_path: Path) -> None:
    Store(tmp_path, JOB, resume=False).add(drawing())
    with pytest.raises(ValueError, match="--resume"):
        Store(tmp_path, JOB, resume=False)
    with pytest.raises(ValueError, match="steps was 2, is 3"):
        Store(tmp_path, replace(JOB, steps=3), resume=True)
    with pytest.raises(ValueError, match=r"versions, torch was '.*', is '1\.0'"):
        Store(tmp_path, replace(JOB, versions=JOB.versions | {"torch": "1.0"}), resume=True)


def test_a_folder_without_pictures_may_be_used(tmp_path: Path) -> None:
    Store(tmp_path, JOB, resume=False)
    Store(tmp_path, replace(JOB, steps=3), resume=False)
    assert json.loads((tmp_path / "job.json").read_text())["steps"] == 3


def test_what_a_folder_is_about_is_written_only_if_it_changes(tmp_path: Path) -> None:
    Store(tmp_path, JOB, resume=False).add(drawing())
    before = (tmp_path / "job.json").stat()
    Store(tmp_path, JOB, resume=True)
    assert (tmp_path / "job.json").stat() == before


def test_pictures_without_a_job_are_not_resumed(tmp_path: Path) -> None:
    Store(tmp_path, JOB, resume=False).add(drawing())
    (tmp_path / "job.json").unlink()
    with pytest.raises(ValueError, match=r"no readable job\.json"):
        Store(tmp_path, JOB, resume=True)


@pytest.mark.parametrize("about", ["null", "3", "[1]", '{"contenders": 3}'])
def test_a_job_that_is_no_object_is_told(tmp_path: Path, about: str) -> None:
    Store(tmp_path, JOB, resume=False).add(drawing())
    (tmp_path / "job.json").write_text(about)
    with pytest.raises(ValueError, match="no readable job"):
        Store(tmp_path, JOB, resume=True)


def test_lines_that_are_no_rows_are_passed_over(tmp_path: Path) -> None:
    fill(Store(tmp_path, JOB, resume=False), ["pizza"], (0,))
    for name in ("rows.jsonl", "scores.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{}\n[]\n3\nnull\n{"sha256": "0"}\n')
    store = Store(tmp_path, JOB, resume=True)
    assert len(store.rows) == 3 and not store.missing(["pizza"], (0,))
    rows, _ = score(store, list(store.rows.values()), load_metrics(MetricOptions(["psnr"])))
    assert sum("psnr" in row for row in rows) == 2


def test_a_folder_that_is_a_file_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert evaluate(tmp_path / "file" / "out") == 2
    assert f"{tmp_path / 'file'} is no folder that may be written to" in capsys.readouterr().err


def test_ways_may_be_added_and_those_left_out_are_remembered(tmp_path: Path) -> None:
    settings = {("tomadiff", 0.5): {"tomadiff": {"scale": 1000.0}}}
    Store(tmp_path, replace(JOB, settings=settings), resume=False).add(drawing())
    other = replace(JOB, contenders=(REFERENCE, ("tome", 0.25)))
    (work,) = Store(tmp_path, other, resume=True).missing(["pizza"], (0,))
    assert work.contenders == (("tome", 0.25),)
    changed = replace(JOB, settings={("tomadiff", 0.5): {"tomadiff": {"scale": 10.0}}})
    with pytest.raises(ValueError, match=r"tomadiff at 0\.5, tomadiff, scale was 1000\.0, is 10\.0"):
        Store(tmp_path, changed, resume=True)


def test_only_what_is_asked_for_counts(tmp_path: Path, finished: Path) -> None:
    """Not the pictures of an earlier session with more prompts, seeds or contenders."""
    folder = shutil.copytree(finished, tmp_path / "out")
    store = Store(folder, replace(JOB, contenders=CONTENDERS[:2]), resume=True)
    rows = store.asked(["hot dog", "red apple"], (0, 7))
    assert [(row["prompt"], row["seed"], row["method"]) for row in rows] == [
        ("hot dog", 0, "dense"),
        ("hot dog", 0, "tomadiff"),
    ]


def test_the_order_of_prompts_does_not_matter(tmp_path: Path, finished: Path) -> None:
    store = Store(shutil.copytree(finished, tmp_path / "out"), JOB, resume=True)
    assert store.missing(PROMPTS[::-1], (1, 0)) == []


def test_models_have_folders_of_their_own_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    names = {
        "emoji-unet": "emoji-unet",
        "stabilityai/sdxl-1.0": "stabilityai-sdxl-1.0",
        "models/tiny/": "tiny",
        "../models": "models",
    }
    for name, folder in names.items():
        monkeypatch.chdir(tmp_path / "models" if name.startswith("..") else tmp_path)
        assert folder_for("evaluation", name) == Path("evaluation") / folder


def test_names_of_folders_are_distinct() -> None:
    names = ["tomadiff:a=1,b=2 at 0.5", "tomadiff:a=1-b=2 at 0.5", "tomadiff at 0.5", "../x"]
    slugs = [slug(name) for name in names]
    assert len(set(slugs)) == 4 and all("/" not in s and not s.startswith(".") for s in slugs)


# -- the summary -------------------------------------------------------------------------------------------


def row(prompt: str, method: str, ratio: float, seconds: float, **more: Any) -> dict[str, Any]:
    common = {"prompt": prompt, "seed": 0, "method": method, "ratio": ratio, "seconds": seconds}
    return {**common, "process": "a", "sha256": f"{prompt} {method}", **more}


MERGED = ("tomadiff", 0.5)


def test_the_summary_has_means_worst_tenths_and_paired_speedups() -> None:
    rows = []
    for number in range(20):
        pace = 1 + number  # the machine gets slower, which must not show
        rows.append(row(str(number), *REFERENCE, 2.0 * pace))
        rows.append(row(str(number), *MERGED, 1.0 * pace, psnr=20.0 + number))
    dense, merged = summarise(rows, [REFERENCE, MERGED], {"tomadiff at 0.5": {"fid": 3.0}})
    assert merged["speedup"] == 2.0 and merged["psnr"] == 29.5 and merged["psnr_worst"] == 20.5
    assert dense["speedup"] == 1.0 and "psnr" not in dense and merged["fid"] == 3.0
    text = table([dense, merged], {"clip": "get it so"})
    assert "| PSNR, dB (worst tenth) |" in text
    assert "29.5 (20.5)" in text and "CLIP-T is not available: get it so" in text
    assert "| CLIP-T |" in text and "| not available |" in text
    assert "| tomadiff | 0.5 | 20 |" in text and "biased upward" in text
    assert "fewer than pictures" not in text and "bit-identical" not in text


def test_speedups_are_of_one_worker_in_one_session() -> None:
    rows = [row("a", *REFERENCE, 2.0), row("b", *REFERENCE, 2.0)]
    rows += [row("a", *MERGED, 1.0), row("b", *MERGED, 0.001, process="another")]
    _, merged = summarise(rows, [REFERENCE, MERGED], {})
    assert merged["speedup"] == 2.0 and merged["pairs"] == 1 and merged["pictures"] == 2
    lines = summarise([*rows[:2], rows[3]], [REFERENCE, MERGED], {})
    assert lines[1]["speedup"] is None
    text = table(lines, {})
    assert "| tomadiff | 0.5 | 1 | 0.001 | - | - |" in text and "fewer than pictures" in text


def test_pictures_that_did_not_change_are_told() -> None:
    rows = [row("a", *REFERENCE, 2.0), row("a", *MERGED, 1.0, psnr=100.0, sha256="a dense")]
    text = table(summarise(rows, [REFERENCE, MERGED], {}), {})
    assert "100 dB at most" in text and "bit-identical to dense are 1 of tomadiff at 0.5" in text


def test_pictures_that_are_all_dense_read_as_equal() -> None:
    rows = [row("a", *REFERENCE, 2.0), row("a", *MERGED, 1.0, psnr=100.0, sha256="a dense")]
    assert "| tomadiff | 0.5 | 1 | 1 | 2.00x | 1 | equal |" in table(
        summarise(rows, [REFERENCE, MERGED], {}), {}
    )


def test_work_is_a_share_of_the_dense_one_averaged_over_what_was_counted() -> None:
    cached = ("first-block", 0.0)
    rows = [row("a", *REFERENCE, 2.0, flops=100), row("b", *REFERENCE, 2.0)]
    rows += [row("a", *cached, 1.0, flops=40), row("b", *cached, 1.0, flops=60)]
    rows += [row("a", *MERGED, 1.0)]
    dense, first_block, merged = summarise(rows, [REFERENCE, cached, MERGED], {})
    assert (dense["work"], first_block["work"], merged["work"]) == (1.0, 0.5, None)
    assert "| first-block | - | 2 | 1 | 2.00x | 2 | 0.500 |" in table([dense, first_block, merged], {})


def test_ways_that_differ_in_one_number_are_one_curve() -> None:
    contenders = [
        ("tomadiff", 0.25),
        ("tomadiff", 0.5),
        ("tomadiff:interval=2", 0.0),
        ("tomadiff:interval=3", 0.0),
    ]
    assert list(curves(contenders).values()) == ["tomadiff"] * 2 + ["tomadiff:interval=..."] * 2
    contenders = [("steps:8,solver=dpm++", 0.0), ("steps:13,solver=dpm++", 0.0), ("steps:13", 0.0)]
    assert list(curves(contenders).values()) == ["steps:...,solver=dpm++"] * 2 + ["steps:13"]
    settings = [(2, 1), (2, 2), (3, 1), (4, 1)]
    several = [
        (f"taylorseer:cache_interval={interval},max_order={order}", 0.0) for interval, order in settings
    ]
    named = curves(several)
    assert named[several[0]] == named[several[2]] == named[several[3]] != named[several[1]]
    assert (
        len(set(curves([("dbcache:taylorseer=True", 0.0), ("dbcache:taylorseer=False", 0.0)]).values())) == 2
    )


def test_work_is_counted_in_the_first_pictures_of_each_way(tmp_path: Path) -> None:
    contenders = (REFERENCE, ("tomadiff", 0.5), ("first-block", 0.0))
    works = Store(tmp_path / "out", replace(JOB, contenders=contenders), resume=False).missing(
        list("abcde"), (0,)
    )
    assert [set(work.counted) for work in works] == [
        set(contenders),
        {contenders[2]},
        {contenders[2]},
        set(),
        set(),
    ]


def test_fid_of_many_pictures_needs_no_warning() -> None:
    rows = [row(str(number), *MERGED, 1.0) for number in range(2048)]
    assert "biased" not in table(summarise(rows, [MERGED], {"tomadiff at 0.5": {"fid": 3.0}}), {})


def test_a_plot_of_nothing_but_slower_ways_is_drawn(tmp_path: Path) -> None:
    rows = [row("a", *REFERENCE, 1.0), row("a", *MERGED, 2.0, psnr=20.0)]
    pareto_plot(summarise(rows, [REFERENCE, MERGED], {}), "psnr", "slow", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_worst_is_at_the_right_end() -> None:
    assert worst_tenth(range(10), higher_is_better=True) == 0
    assert worst_tenth(range(10), higher_is_better=False) == 9


def test_the_front_is_what_nothing_beats() -> None:
    points = [(1.0, 30.0), (1.5, 25.0), (1.4, 24.0), (2.0, 20.0), (1.2, 31.0)]
    assert pareto(points, higher_is_better=True) == [(1.2, 31.0), (1.5, 25.0), (2.0, 20.0)]
    assert pareto([(1.0, 0.1), (2.0, 0.05)], higher_is_better=False) == [(2.0, 0.05)]


def test_cases_show_the_best_the_median_and_the_worst() -> None:
    rows = []
    for prompt, value in {"a": 10.0, "b": 30.0, "c": 20.0}.items():
        rows += [row(prompt, *REFERENCE, 1.0), row(prompt, *MERGED, 1.0, psnr=value)]
    asked: list[str] = []

    def read(row: dict[str, Any]) -> Image.Image:
        asked.append(row["prompt"])
        return Image.new("RGB", (16, 16))

    sheet = cases(rows, [REFERENCE, MERGED], read, side=100)
    assert sheet.width > 300 and 200 < sheet.height < 300, "three cases, two contenders"
    assert asked == ["b", "b", "c", "c", "a", "a"]


# -- killed in the middle ----------------------------------------------------------------------------------


def test_after_kill_9_everything_finished_is_kept_and_the_rest_is_drawn(tmp_path: Path) -> None:
    """Where Ray is not installed, too."""
    folder = tmp_path / "out"
    methods = ["--methods", "tomadiff", "tome", "--metrics", "psnr"]
    command = ["eval", *SMALL, "--limit", "6", *methods]
    code = f"""
import os, signal, sys
sys.modules["ray"] = None
from tomadiff.tools.cli import main
from tomadiff.tools.evaluate import store

append = store.append

def append_or_die(path, row):
    if len(store.read_rows(path)) == 4:  # when the fifth picture is there, but not its row
        os.kill(os.getpid(), signal.SIGKILL)
    append(path, row)

store.append = append_or_die
main({[*command, "-o", str(folder)]})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    kept = {row["file"]: row for row in read_rows(folder / "rows.jsonl")}
    assert len(kept) == 4 and len(list(folder.rglob("*.png"))) == 5
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
    for metric in ("CLIP-T", "DINO"):
        assert printed.out.count(f"{metric} is not available: ") == 1 and f"| {metric} |" in printed.out
    assert printed.err.count("not available: DINO, CLIP-T; how to get them") == 1
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    merged = next(line for line in summary["lines"] if line["method"] == "tomadiff" and line["ratio"] == 0.5)
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
    lines = lines_of(tmp_path)
    assert "psnr" not in lines["dense"] and "psnr" in lines["tomadiff"]


def test_rivals_are_drawn_with_their_work_and_a_control_is_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = ["tomadiff:interval=[0, 1, 3]", "tomadiff:interval=1,ratio=0"]
    contenders = ["steps:2", "deepcache:interval=2", *ours]
    steps = ["--steps", "4", "--scheduler", "euler-a", "--metrics", "psnr"]
    assert evaluate(tmp_path, *steps, "--methods", *contenders) == 0
    lines = lines_of(tmp_path)
    assert [lines[method]["work"] for method in ("dense", contenders[0], contenders[2], contenders[3])] == [
        1,
        0.5,
        0.75,
        1,
    ]
    assert 0.5 < lines[contenders[1]]["work"] < 1
    assert "| equal |" in next(line for line in capsys.readouterr().out.splitlines() if contenders[3] in line)
    assert json.loads((tmp_path / "job.json").read_text())["scheduler"] == "euler-a"
    rows = list(csv.DictReader((tmp_path / "summary.csv").open()))
    assert [row["method"] for row in rows] == list(lines) and float(rows[1]["work"]) == 0.5


def test_caches_of_diffusers_are_ways_too(tmp_path: Path) -> None:
    flux = ["eval", "--model", "emoji-flux", "--limit", "1", "--steps", "6", "--size", "32", "32"]
    contenders = ["first-block:threshold=0.5", "first-block:threshold=0.5+tomadiff", "tomadiff"]
    assert main([*flux, "--metrics", "psnr", "--methods", *contenders, "-o", str(tmp_path)]) == 0
    lines = lines_of(tmp_path)
    assert lines[contenders[0]]["ratio"] == 0 and lines[contenders[1]]["ratio"] == 0.5
    assert lines[contenders[1]]["psnr"] < lines[contenders[0]]["psnr"] < 100


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seeds", "0"], "at least 1"),
        (["--methods", "tomata"], "unknown method"),
        (["--methods", "first-block"], "no caches for"),
        (["--methods", "tomadiff:ratio={16: 0.5}"], "it has 1, 2, 'block'"),
        (["--methods", "tomadiff:dense_blocks=50"], "beyond dense_blocks=50"),
        (["--methods", "tomadiff:ratio=0.5,ratio=0.75"], "each once"),
        (["--methods", "dense:ratio=0.5"], "dense has no settings"),
        (["--methods", "dbcache"], "transformers only"),
        (
            ["--methods", "steps:4,solver=stochastic"],
            "no scheduler 'stochastic' for a model that predicts noise",
        ),
        (["--scheduler", "stochastic"], "no scheduler 'stochastic' for a model that predicts noise"),
        (["--methods", "todo"], "whole factors"),
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        (["--prompts", "imagenet"], "words that the embedded model doesn't know"),
        (["--workers", "2"], "for --engine ray"),
        (["--device", "cuda:9"], "can't use device"),
        (["--engine", "ray", "--device", "cuda"], "needs --gpus-per-worker"),
        (["--engine", "ray", "--gpus-per-worker", "1"], "needs --device cuda"),
        (["--engine", "ray", "--gpus-per-worker", "-1"], "must not be negative"),
        (["--engine", "ray", "--device", "cuda:1", "--gpus-per-worker", "1"], "Ray chooses the GPU"),
        (["--fid-against", "nowhere"], "--fid-against nowhere: no such folder"),
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

    from tomadiff.tools.arguments.evaluate import add_arguments
    from tomadiff.tools.evaluate import command
    from tomadiff.tools.evaluate.prompts import load_prompts

    parser = ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--protocol", "paper"])
    command.resolve_arguments(args)
    assert len(load_prompts(args.prompts, args.limit)) * args.seeds == 3000
    assert {"fid", "clip", "dino"} <= set(args.metrics) and args.ratio == [0.25, 0.5, 0.75]
    args = parser.parse_args(["--protocol", "ablation", "--model", "some/model"])
    command.resolve_arguments(args)
    assert len(load_prompts(args.prompts, args.limit)) * args.seeds == 150


def test_an_interrupt_leaves_a_summary_of_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a prompt, of which only one picture is there."""
    finished = local.run

    def interrupted(job: Job, works: list[Any]) -> Any:
        for count, drawing in enumerate(finished(job, works)):
            if count == 3:
                raise KeyboardInterrupt
            yield drawing

    monkeypatch.setattr(local, "run", interrupted)
    assert evaluate(tmp_path, "--metrics", "psnr") == 130
    assert "continue with --resume" in capsys.readouterr().err
    assert len(read_rows(tmp_path / "rows.jsonl")) == 3 and (tmp_path / "cases.png").exists()
    monkeypatch.undo()
    assert evaluate(tmp_path, "--metrics", "psnr", "--resume") == 0
    assert len(read_rows(tmp_path / "rows.jsonl")) == 6


def test_another_default_does_not_get_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The method is called the same, but it is not."""
    assert evaluate(tmp_path, "--metrics", "psnr") == 0
    monkeypatch.setitem(METHODS["toma"].defaults, "region_size", 4)
    assert evaluate(tmp_path, "--metrics", "psnr", "--resume") == 2
    assert (
        "tomadiff at 0.5, tomadiff, region_size was 8, is 4; take another folder" in capsys.readouterr().err
    )


def test_the_version_of_tomesd_is_known() -> None:
    family = next(family for family in FAMILIES if family.name == "unet")
    found = resolved("tomesd:sx=4", 0.5, family)["tomesd:sx=4"]
    assert (
        found["version"] and found["sx"] == 4 and found["max_downsample"] == 4 and found["use_rand"] is True
    )


def test_a_resumed_evaluation_is_about_what_was_asked_for_last(tmp_path: Path) -> None:
    """Other prompts and methods stay in the folder, and what has no time to compare with has no speed-up."""
    common = ["--metrics", "psnr", "-o", str(tmp_path)]
    assert main(["eval", *SMALL, "--limit", "4", "--methods", "tomadiff", "tofu", *common]) == 0
    assert main(["eval", *SMALL, "--limit", "2", "--methods", "tomadiff", "tome", *common, "--resume"]) == 0
    lines = lines_of(tmp_path)
    assert {method: line["pictures"] for method, line in lines.items()} == {
        "dense": 2,
        "tomadiff": 2,
        "tome": 2,
    }
    assert {method: line["pairs"] for method, line in lines.items()} == {"dense": 2, "tomadiff": 2, "tome": 0}
    assert lines["tome"]["speedup"] is None and lines["tome"]["psnr"] > 0
    assert len(read_rows(tmp_path / "rows.jsonl")) == 4 * 3 + 2


def test_a_metric_that_fails_leaves_the_others(
    tmp_path: Path, real: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pictures too small for LPIPS, which is seen when they are there."""
    small = ["eval", *SMALL[:-4], "16", "16", "--threads", "1", "--limit", "1", "-o", str(tmp_path)]
    assert main([*small, "--metrics", "psnr", "lpips", "ssim"]) == 0
    assert "LPIPS is not available: LPIPS needs 31 pixels a side" in capsys.readouterr().out
    merged = lines_of(tmp_path)["tomadiff"]
    assert "psnr" in merged and "ssim" in merged and "lpips" not in merged


def test_fid_against_real_pictures_from_a_folder_or_their_statistics(tmp_path: Path, real: None) -> None:
    (tmp_path / "real").mkdir()
    for number, picture in enumerate(load_emoji()[:3]):
        pixels = ((picture + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(tmp_path / "real" / f"{number}.png")
    Inception().statistics(tmp_path / "real").save(tmp_path / "real.npz")
    found = []
    for source in ("real", "real.npz"):
        more = ["--metrics", "fid", "--fid-against", str(tmp_path / source), "--resume"]
        assert evaluate(tmp_path / "out", *more) == 0
        found.append([line["fid"] for line in lines_of(tmp_path / "out").values()])
    assert len(found[0]) == 2 and min(found[0]) > 1  # dense has one too
    assert found[0] == pytest.approx(found[1])


def test_fid_of_one_picture_is_told_to_be_none(
    tmp_path: Path, real: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(tmp_path, "--limit", "1", "--metrics", "fid") == 0
    assert "FID is not available: it needs two pictures or more by each method" in capsys.readouterr().out


def test_statistics_of_another_network_are_refused_before_anything_is_drawn(
    tmp_path: Path, real: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Statistics.of([torch.rand(9, 4)]).save(tmp_path / "other.npz")
    assert evaluate(tmp_path / "out", "--fid-against", str(tmp_path / "other.npz")) == 2
    assert "4 channels, not the 2048 of Inception" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("missing", "address"), [("ray", []), ("grpc", ["--address", "ray://nowhere:1"])])
def test_without_ray_or_its_client_the_engine_says_how_to_get_it(
    tmp_path: Path,
    missing: str,
    address: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert evaluate(tmp_path / "out", "--engine", "ray", *address) == 2
    assert "pip install 'tomadiff[ray]'" in capsys.readouterr().err


def test_scores_of_another_model_are_other_scores() -> None:
    assert MetricOptions(["clip"], clip_model="a").name_of("clip") != MetricOptions(
        ["clip"], clip_model="b"
    ).name_of("clip")
