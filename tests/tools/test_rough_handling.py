"""What users do by accident, and others on purpose, is told in a line, and breaks nothing."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import shutil
import signal
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluations import JOB, PROMPTS, SMALL, fill
from PIL import Image

import tomadiff
from tomadiff import settings_file
from tomadiff.errors import ConfigError
from tomadiff.runtime.files import atomic_write, cache, locked, parse_json
from tomadiff.tools import cli
from tomadiff.tools.bench.plot import plot
from tomadiff.tools.bench.record import Record
from tomadiff.tools.evaluate import scores, summary
from tomadiff.tools.evaluate.job import Drawing
from tomadiff.tools.evaluate.pictures import open_picture
from tomadiff.tools.evaluate.prompts import load_prompts
from tomadiff.tools.evaluate.store import Store, read_rows, slug
from tomadiff.tools.evaluate.summary import pareto_plot

DEEP = "[" * 900 + "]" * 900  # json can read it, and little else can
DEEPER = "[" * 100_000 + "]" * 100_000


# -- folders in use ----------------------------------------------------------------------------------------


@contextmanager
def held_by_another(folder: Path) -> Iterator[int]:
    """The number of a process that is in a folder, until it is killed."""
    said, say = os.pipe()
    child = os.fork()
    if not child:
        with locked(folder):
            os.write(say, b"in")
            signal.pause()
        os._exit(0)
    try:
        assert os.read(said, 2) == b"in"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(said)
        os.close(say)


@pytest.mark.parametrize(
    "command", [["eval", *SMALL, "--metrics", "psnr", "-o"], ["tune", *SMALL, "--psnr", "30", "--folder"]]
)
def test_a_folder_in_use_is_left_alone_and_its_user_named(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "evaluation"
    with held_by_another(folder) as holder:
        assert cli.main([*command, str(folder), "--resume", "--limit", "1"]) == 2
        assert f"in use by process {holder} on " in capsys.readouterr().err
        assert os.listdir(folder) == [".lock"]
    with locked(folder):
        pass  # the lock went with the process, though that was killed


def test_a_lock_that_leads_elsewhere_empties_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "evaluation"
    precious.write_text("mine")
    folder.mkdir()
    (folder / ".lock").symlink_to(precious)
    command = ["eval", *SMALL, "--limit", "1", "--metrics", "psnr", "-o", str(folder), "--resume"]
    assert cli.main(command) == 2
    assert f"won't write to {folder / '.lock'}: it is a link" in capsys.readouterr().err
    assert precious.read_text() == "mine" and os.listdir(folder) == [".lock"]


# -- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_are_as_private_as_the_user_wants_them(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        atomic_write(tmp_path / "x", lambda path: path.write_text("x"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o666 & ~mask
    assert os.listdir(tmp_path) == ["x"]


def test_a_user_without_a_home_has_a_cache_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME", "TOMADIFF_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache().is_dir() and cache() == cache()


@pytest.mark.parametrize("text", [DEEP, DEEPER, '{"a":' * 100 + "1" + "}" * 100])
def test_what_is_nested_too_deep_is_no_json(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        parse_json(text)
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="nested too deep"):
        settings_file.load(file)
    with pytest.raises(ValueError, match="can't resume"):
        Record({}).resume(file)
    (tmp_path / "rows.jsonl").write_text(text + "\n" + '{"a": 1}\n')
    assert read_rows(tmp_path / "rows.jsonl", {"a": int}) == [{"a": 1}]
    (tmp_path / "prompts.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 1 is not JSON"):
        load_prompts(str(tmp_path / "prompts.jsonl"))


@pytest.mark.parametrize("modules", [[["self"]], [{}], [None], "everything", []])
def test_modules_that_are_none_are_told(modules: Any, tmp_path: Path) -> None:
    content = {settings_file.HEAD: 1, "config": {"where": "module", "modules": modules}}
    (tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"modules=.* must be one or more of"):
        settings_file.load(tmp_path / "x.json")


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    given = {"ratio": np.float32(0.5), "region_size": np.int64(4), "dense_blocks": np.int32(2)}
    config = tomadiff.Config(**given)
    assert config == tomadiff.Config(ratio=0.5, region_size=4, dense_blocks=2)
    by_level = tomadiff.Config(ratio={np.int64(1): np.float64(0.5)})
    settings_file.save(tmp_path / "x.json", by_level)
    assert settings_file.load(tmp_path / "x.json").config == tomadiff.Config(ratio={1: 0.5})
    assert {type(value) for value in by_level.ratio.values()} == {float}


# -- evaluations and benchmarks of others --------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    fill(Store(folder, JOB, resume=False), PROMPTS[:1], (0,))
    return folder


def changed_row(folder: Path, **values: Any) -> Store:
    """The store after its first row was changed by hand."""
    first, *others = (folder / "rows.jsonl").read_text().splitlines()
    lines = [json.dumps(json.loads(first) | values), *others]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return Store(folder, JOB, resume=True)


@pytest.fixture
def evaluation(drawn: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(drawn, tmp_path / "evaluation"))


@pytest.mark.parametrize("inside", [False, True])
def test_a_row_that_points_outside_its_folder_is_not_believed(inside: bool, evaluation: Path) -> None:
    secret = evaluation.parent / "secret.png"
    secret.write_bytes(b"secret")
    if inside:
        (evaluation / "link.png").symlink_to(secret)
    file = "link.png" if inside else "../secret.png"
    store = changed_row(evaluation, file=file, sha256=hashlib.sha256(b"secret").hexdigest())
    assert store.damaged == [file] and len(store.rows) == len(JOB.contenders) - 1


def test_scores_are_not_written_to_where_a_link_leads(evaluation: Path) -> None:
    precious = evaluation.parent / "precious"
    precious.write_text("mine")
    (evaluation / "scores.jsonl").unlink(missing_ok=True)
    (evaluation / "scores.jsonl").symlink_to(precious)
    store = Store(evaluation, JOB, resume=True)
    metrics = scores.load_metrics(scores.MetricOptions(["psnr"]))
    with pytest.raises(ValueError, match=r"won't write to .*scores\.jsonl: it is a link"):
        scores.score(store, store.asked(PROMPTS[:1], (0,)), metrics)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("link", ["images", "images/{}"])
def test_pictures_do_not_go_to_where_a_link_leads(link: str, evaluation: Path, tmp_path: Path) -> None:
    drawing = Drawing("pizza", 9, *JOB.contenders[0], 1.0, "somebody", b"picture")
    place = evaluation / link.format(slug(drawing.label))
    shutil.rmtree(place)
    (tmp_path / "elsewhere").mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="a link leads it out of"):
        Store(evaluation, JOB, resume=True).add(drawing)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    "values",
    [
        {"seconds": "1"},
        {"seconds": 0},
        {"seconds": -1.0},
        {"seconds": None},
        {"seed": [0]},
        {"seed": True},
        {"prompt": {}},
        {"method": 3},
        {"ratio": "half"},
        {"process": []},
        {"file": 7},
        {"file": "a\0b"},
        {"file": "x" * 5000},
        {"file": "images"},
        {"sha256": None},
        {"seconds": 10**400},
        {"flops": "x"},
        {"flops": [1]},
        {"flops": None},
        {"flops": True},
        {"flops": 10**400},
        {"flops": float("nan")},
    ],
    ids=lambda values: str(values)[:30],
)
def test_a_row_of_odd_types_is_drawn_again(values: dict[str, Any], evaluation: Path) -> None:
    store = changed_row(evaluation, **values)
    assert len(store.rows) == len(JOB.contenders) - 1
    assert len(store.missing(PROMPTS[:1], (0,))) == 1


@pytest.mark.parametrize("value", ["0.5", None, [1], {"a": 1}, True])
def test_a_score_of_an_odd_type_is_made_again(value: Any, evaluation: Path) -> None:
    store = Store(evaluation, JOB, resume=True)
    metrics = scores.load_metrics(scores.MetricOptions(["psnr", "ssim"]))
    asked = store.asked(PROMPTS[:1], (0,))
    right, _ = scores.score(store, asked, metrics)
    lines = [json.loads(line) for line in (evaluation / "scores.jsonl").read_text().splitlines()]
    wrong = "".join(json.dumps(line | {"psnr": value}) + "\n" for line in lines)
    (evaluation / "scores.jsonl").write_text(wrong + '{"sha256": [], "dense": {}}\n')
    assert scores.score(store, asked, metrics)[0] == right


def test_a_row_has_no_scores(evaluation: Path) -> None:
    """What was measured is elsewhere, with the checksums of the pictures."""
    store = changed_row(evaluation, psnr="x", lpips="x", clip="x", flops=1e9)
    row, *_ = found = store.asked(PROMPTS[:1], (0,))
    assert row["flops"] == 1e9 and not {"psnr", "lpips", "clip"} & row.keys()
    assert summary.table(summary.summarise(found, JOB.contenders, {}), {})


@pytest.mark.parametrize("value", [1e308, 10**400], ids=["1e308", "10**400"])
def test_numbers_that_nobody_measures_are_none(value: float, evaluation: Path) -> None:
    """Their sum is more than a number can be."""
    store = Store(evaluation, JOB, resume=True)
    asked, metrics = store.asked(PROMPTS[:1], (0,)), scores.load_metrics(scores.MetricOptions(["psnr"]))
    right, _ = scores.score(store, asked, metrics)
    lines = [json.loads(line) | {"psnr": value} for line in (evaluation / "scores.jsonl").open()]
    (evaluation / "scores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert scores.score(store, asked, metrics)[0] == right


def test_words_of_others_do_not_reach_the_terminal_as_they_are(evaluation: Path) -> None:
    escape = "\x1b]0;evil\x07"
    (evaluation / f"{escape}.png").write_bytes(b"x")
    store = changed_row(evaluation, file=f"{escape}.png", sha256=hashlib.sha256(b"x").hexdigest())
    assert len(store.rows) == len(JOB.contenders) - 1, "its name would be shown while it is scored"
    job = json.loads((evaluation / "job.json").read_text())
    (evaluation / "job.json").write_text(json.dumps(job | {escape: escape}))
    with pytest.raises(ValueError, match="drawn differently") as error:
        Store(evaluation, JOB, resume=True)
    assert str(error.value).isprintable()


def test_features_that_are_none_are_made_again(tmp_path: Path) -> None:
    assert all(scores._unpack(text) is None for text in ("", "AAAA", "no base64!", "é", "AAAAAA=="))


RUN = {
    "size": [8, 8],
    "method": "dense",
    "ratio": 0.0,
    "round": 0,
    "seconds": 1.0,
    "plan_seconds": None,
    "merge_seconds": None,
    "unmerge_seconds": None,
    "peak_bytes": 1,
}


@pytest.mark.parametrize(
    "values",
    [
        {"seconds": "fast"},
        {"seconds": None},
        {"seconds": 0},
        {"size": 8},
        {"size": "88"},
        {"size": [8]},
        {"size": [8, None]},
        {"method": ["dense"]},
        {"method": "tomadiff:a=(("},
        {"ratio": {}},
        {"round": []},
        {"peak_bytes": "1"},
        {"plan_seconds": "x"},
        {"unknown": 1},
    ],
    ids=str,
)
def test_a_run_of_odd_types_is_no_record(values: dict[str, Any], tmp_path: Path) -> None:
    content = {"about": {}, "runs": [RUN | values], "counts": [], "keep_steps": {}}
    (tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="can't resume"):
        Record({}).resume(tmp_path / "x.json")


@pytest.mark.parametrize("method", ["first-block:threshold=0.1+tomadiff", "tomadiff:where=block", "tomesd"])
def test_a_record_of_any_method_is_resumed(method: str, tmp_path: Path) -> None:
    content = {"about": {}, "runs": [RUN, RUN | {"method": method, "ratio": 0.5}], "counts": []}
    (tmp_path / "x.json").write_text(json.dumps(content | {"keep_steps": {method: 2}}))
    record = Record({})
    record.resume(tmp_path / "x.json")
    assert [run.method for run in record.runs] == ["dense", method]


def test_half_a_round_is_measured_again(tmp_path: Path) -> None:
    ours = RUN | {"method": "tomadiff", "ratio": 0.5}
    runs = [RUN, ours, ours | {"round": 1}]
    content = {"about": {}, "runs": runs, "counts": [], "keep_steps": {}}
    (tmp_path / "x.json").write_text(json.dumps(content))
    record = Record({})
    record.resume(tmp_path / "x.json")
    assert [run.round for run in record.runs] == [0, 0] and len(record.rows()) == 2


# -- pictures and plots --------------------------------------------------------------------------------------


def bomb(path: Path, side: int) -> None:
    """A PNG of a few bytes that says it is huge."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


@pytest.mark.parametrize("side", [20_000, 60_000])
def test_pictures_that_would_fill_the_memory_are_told(side: int, tmp_path: Path) -> None:
    bomb(tmp_path / "x.png", side)
    with pytest.raises(ValueError, match=r"can't read the picture .*x\.png"):
        open_picture(tmp_path / "x.png")


@pytest.mark.parametrize("title", ["$_$", "a $\\frac$ fox", "$$$", "50 $ or 60 $^"])
def test_a_prompt_with_dollars_is_no_formula(title: str, tmp_path: Path) -> None:
    line = {"method": "tome", "ratio": 0.5, "speedup": 1.5, "psnr": 30.0}
    pareto_plot([line], "psnr", title, tmp_path / "a.png")
    row = {"size": (8, 8), "method": "tome", "ratio": 0.5, "speedup": 2.0, "speedup_spread": (2.0, 2.0)}
    plot([row | {"seconds": 1.0}], title, tmp_path / "b.png")
    for name in ("a.png", "b.png"):
        Image.open(tmp_path / name).load()


# -- the command line ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", ""], "there is no prompt"),
        (["generate", " \t"], "there is no prompt"),
        (["merge-map", " "], "there is no prompt"),
        (
            ["bench", "--model", "emoji-unet", "--threads", "100000"],
            "--threads 100000 must be from 1 to 1024",
        ),
        (["eval", "--threads", "100000"], "--threads 100000 must be"),
        (["tune", "--psnr", "30", "--threads", "100000"], "--threads 100000 must be"),
        (["ui", "--threads", "100000"], "--threads 100000 must be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_on_the_command_line_are_told(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert says in capsys.readouterr().err and not list(tmp_path.iterdir())
