"""The benchmark: who takes turns with whom, what the figures are, and that nothing measured is lost."""

from __future__ import annotations

import csv
import inspect
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import selection
import torch
from PIL import Image
from pipelines import bare_call, denoiser, make, shallow

from tomadiff import kernels
from tomadiff.core import facility_location
from tomadiff.models import unet
from tomadiff.tools.bench import expect, figures, models, session
from tomadiff.tools.bench.compiled import compiled_contenders
from tomadiff.tools.bench.contenders import Contender, contender
from tomadiff.tools.bench.measure import Run, graphs, rounds
from tomadiff.tools.bench.plot import plot
from tomadiff.tools.bench.record import Record
from tomadiff.tools.bench.step import capture
from tomadiff.tools.cli import main
from tomadiff.tools.demo.codec import PatchCodec
from tomadiff.tools.demo.pipelines import EmojiFluxPipeline
from tomadiff.tools.method_spec import pairs, parse

SMALL = ["bench", "--model", "emoji-unet", "--size", "32"]


def run(method: str, ratio: float, number: int, seconds: float, plan: float | None = None) -> Run:
    return Run((64, 64), method, ratio, number, seconds, plan, 0.1, 0.2, 3 * 10**9, 2 * 10**9)


def in_turns(merged: float, count: int = 2) -> list[Run]:
    """Rounds of dense, which takes a second, and merged calls."""
    pairs = [(run("dense", 0.0, n, 1.0), run("tomadiff", 0.5, n, merged, 0.0)) for n in range(count)]
    return [each for pair in pairs for each in pair]


# -- figures -----------------------------------------------------------------------------------------------


def test_figures_are_medians_of_ratios_within_rounds() -> None:
    """The machine gets slower from round to round, which must not show."""
    runs = []
    for number, pace in enumerate((1.0, 2.0, 10.0)):
        runs += [run("dense", 0, number, 4 * pace), run("ideal", 0.5, number, 2 * pace, 0.0)]
        runs += [run("tomadiff", 0.5, number, 2.4 * pace, 0.5 * pace)]
    rows = {row["method"]: row for row in figures.rows(runs, [], {"tomadiff": 5})}
    # a fifth of the planning is added
    assert rows["tomadiff"]["speedup"] == pytest.approx(4 / 2.5)
    assert rows["tomadiff"]["speedup_spread"] == pytest.approx((4 / 2.5, 4 / 2.5))
    assert rows["tomadiff"]["of_ideal"] == pytest.approx((4 - 2.5) / (4 - 2))
    assert rows["tomadiff"]["seconds"] == pytest.approx(5.0)
    assert rows["ideal"]["speedup"] == pytest.approx(2.0)
    assert rows["dense"]["speedup"] == 1.0


def test_rounds_in_which_the_ideal_was_disturbed_are_no_measure_of_shares() -> None:
    """What is slower than dense must not look like the ideal because that was slower, too."""
    runs = []
    for number, ideal in enumerate((1.2, 1.25, 0.8, 0.8, 0.8)):
        runs += [run("dense", 0, number, 1.0), run("ideal", 0.5, number, ideal, 0.6)]
        runs += [run("tomadiff", 0.5, number, 1.1, 0.0)]
    rows = {row["method"]: row for row in figures.rows(runs, [], {"ideal": 6})}
    assert rows["tomadiff"]["of_ideal"] == pytest.approx(-0.1 / (1 - 0.9))
    assert rows["ideal"]["of_ideal"] == pytest.approx(1.0), (
        "with the same share of its planning on both sides"
    )


def test_without_dense_or_ideal_there_are_no_figures_against_them() -> None:
    (row,) = figures.rows([run("tomadiff", 0.5, 0, 1.0)], [], {})
    assert "speedup" not in row and "of_ideal" not in row
    assert "1.00" in figures.table([row], "call")


def test_counts_are_put_beside_their_runs() -> None:
    counts = [{"size": [64, 64], "method": "dense", "ratio": 0.0, "model_flops": 3e12, "launches": 7}]
    (row,) = figures.rows([run("dense", 0.0, 0, 1.0)], counts, {})
    assert row["model_flops"] == 3e12 and row["size"] == (64, 64)
    assert "3.00" in figures.table([row], "call")


@pytest.mark.parametrize(
    ("merged", "says"),
    [
        (0.97, "at 64 x 64 on this device merging at 0.5 saves 3%: not worth it"),
        (0.5, "at 64 x 64 on this device merging at 0.5 saves 50%: worth it"),
        (1.25, "at 64 x 64 on this device merging at 0.5 costs 25%: not worth it"),
    ],
)
def test_the_break_even_answer_in_words(merged: float, says: str) -> None:
    assert figures.words(figures.rows(in_turns(merged), [], {})) == [says]


def test_one_round_is_no_answer() -> None:
    (said,) = figures.words(figures.rows(in_turns(0.5, count=1), [], {}))
    assert "saves 50%: one round is not enough to tell" in said and "worth" not in said


# -- measuring ---------------------------------------------------------------------------------------------


def test_contenders_take_turns_and_are_switched_off_again() -> None:
    log: list[str] = []

    @contextmanager
    def used(name: str) -> Iterator[None]:
        log.append(f"{name} on")
        yield
        log.append(f"{name} off")

    entries = [Contender(name, 0.0, partial(used, name)) for name in "ab"]
    told: list[Any] = []
    found = list(rounds(log.append, entries, (8, 8), [0, 1], torch.device("cpu"), False, told.append))
    turns = [entry for entry in log if not isinstance(entry, int)]
    there, back = ["a on", "a off", "b on", "b off"], ["b on", "b off", "a on", "a off"]
    assert turns == [*there, *there, *back], "first to warm up; then nobody is always after the same one"
    assert [[r.method for r in runs] for runs in found] == [["a", "b"], ["b", "a"]]
    assert [r.round for runs in found for r in runs] == [0, 0, 1, 1]
    assert [p.done for p in told] == [1, 2, 3, 4, 5, 6] and told[-1].left == 0


def test_words_tell_what_merging_saves() -> None:
    rows = figures.rows(in_turns(0.5), [], {})
    assert rows[1]["speedup"] == 2
    assert figures.words(rows) == ["at 64 x 64 on this device merging at 0.5 saves 50%: worth it"]


def test_single_calls_are_of_steps_that_run() -> None:
    entry = contender(denoiser(make("sd1")), None, "tomadiff:interval=2", 0.5)
    assert entry.config.interval == 1 and entry.config.ratio == 0.5


def test_plans_that_are_kept_are_timed_apart_and_others_in_the_call() -> None:
    model = denoiser(make("sd1"))
    call = bare_call(model)
    table = torch.linspace(1000, 1, 1000)

    @torch.no_grad()
    def step(n: int) -> Any:
        return model(**{**call, "timestep": table[n]})

    entries = [contender(model, None, name, 0.5) for name in ("tomadiff:share=kind", "tome")]
    for runs in rounds(step, entries, (128, 128), [0, 1, 2], torch.device("cpu"), False, lambda _: None):
        kept, every = sorted(runs, key=lambda r: r.method)
        assert kept.plan_seconds > 0 and every.plan_seconds > 0
        assert every.seconds > every.plan_seconds + every.merge_seconds + every.unmerge_seconds
        assert kept.peak_bytes > 10**7
        assert kept.level_bytes > 10**7
    levels, made = 2, entries[0].patch.counts.refreshes
    assert made["destinations"] == 4 * levels, "made in every run, for both levels"
    assert not hasattr(model, "_tomadiff")


def test_methods_are_measured_at_the_ratios_they_can_do() -> None:
    todo, left_out = pairs(["dense", "tomadiff", "todo", "tomesd"], [0.5, 0.75], unet.FAMILY)
    assert todo == [
        ("dense", 0.0),
        ("tomadiff", 0.5),
        ("tomesd", 0.5),
        ("tomadiff", 0.75),
        ("todo", 0.75),
        ("tomesd", 0.75),
    ]
    assert len(left_out) == 1 and "todo at 0.5" in left_out[0]


def test_a_way_that_is_asked_for_twice_is_measured_once() -> None:
    found, _ = pairs(["tomadiff", "tomadiff:ratio=0.5", "tomadiff:ratio=0.25"], [0.5, 0.5], unet.FAMILY)
    assert found == [("tomadiff", 0.25), ("tomadiff", 0.5)]


def test_a_way_may_have_ratios_of_its_own() -> None:
    methods = [
        "tomadiff:ratio=0.25,where=block",
        "tomadiff:ratio={1:0.5}",
        "tomesd:ratio=0.75",
        "tomadiff:ratio=0",
    ]
    todo, left_out = pairs([*methods, "tome"], [0.5], unet.FAMILY)
    assert not left_out and todo == [
        ("tomadiff:ratio={1: 0.5}", 0.0),
        ("tomadiff:ratio=0", 0.0),
        ("tomadiff:where=block", 0.25),
        ("tome", 0.5),
        ("tomesd", 0.75),
    ]
    model = denoiser(make("sd1"))
    ratios = [contender(model, None, *pair).config.ratio for pair in todo[:4]]
    assert ratios == [{1: 0.5}, 0, 0.25, 0.5]


@pytest.mark.parametrize("setting", ["interval=2", "ratio=[(0,0.25),(4,0.75)]"])
def test_steps_that_differ_are_measured_in_whole_generations_only(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ["--methods", "dense", f"tomadiff:{setting}"]
    assert main([*SMALL, *methods]) == 2
    assert "add --steps" in capsys.readouterr().err
    assert main([*SMALL, *methods, "--steps", "3", "--repeats", "1", "--no-count"]) == 0


def test_settings_behind_a_method_are_used() -> None:
    model = denoiser(make("sd1"))
    config = contender(model, None, "toma_tile:shift=True,share=block,dense_blocks=1", 0.25).config
    assert (config.where, config.shift, config.share, config.dense_blocks) == ("module", True, "block", 1)
    assert config.ratio == 0.25


# -- the command -------------------------------------------------------------------------------------------


def test_the_command_writes_a_table_json_csv_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [f"--{kind}={tmp_path / f'out.{kind}'}" for kind in ("json", "csv")]
    methods = ["dense", "ideal", "tomadiff", "todo", "tomesd"]
    more = [
        "--ratio",
        "0.5",
        "0.75",
        "--repeats",
        "2",
        "--plot",
        str(tmp_path / "out.png"),
        "--size",
        "32x48",
    ]
    assert main([*SMALL, "64", *more, "--methods", *methods, *files]) == 0
    printed = capsys.readouterr()
    assert "| 32 x 48 | todo | 0.75 |" in printed.out and "| 64 x 64 | tomesd | 0.5 |" not in printed.out
    assert "at 32 x 48 on this device merging at 0.75" in printed.out
    assert "left]" in printed.err
    content = json.loads((tmp_path / "out.json").read_text())
    ours = next(row for row in content["rows"] if (row["method"], row["ratio"]) == ("tomadiff", 0.5))
    assert ours["model_flops"] > 1e8 and 0 < ours["overhead_flops_share"] < 0.05
    assert ours["launches_added"] > 10 and ours["expected_speedup"] > 0.5 and ours["keep_steps"] == 1
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert len(rows) == len(content["runs"]) == 2 * (1 + 2 * 3 + 1), "todo has but one of these ratios"
    assert rows[0]["torch"] == torch.__version__ and rows[0]["processor"] and rows[0]["size"] == "32x48"
    settings = {row["method"]: json.loads(row["settings"]) for row in rows}
    assert settings["tomadiff"]["regions"] == "tile" and settings["tomesd"]["max_downsample"] == 4
    with Image.open(tmp_path / "out.png") as picture:
        assert picture.width > picture.height > 300


@pytest.mark.parametrize("used", [True, False])
def test_kernels_are_counted_where_they_are_used(used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where they are turned off, or the probe failed, though there is a GPU."""
    told: list[bool] = []
    monkeypatch.setattr(session, "kernels_run", lambda device, dtype: used)
    count_all = expect.count_all

    def note(*given: Any, kernels: bool) -> Any:
        told.append(kernels)
        return count_all(*given, kernels=kernels)

    monkeypatch.setattr(expect, "count_all", note)
    assert main([*SMALL, "--methods", "tomadiff", "--ratio", "0.5", "--repeats", "1"]) == 0
    assert told == [used]


def test_kernels_are_used_where_the_probe_says_that_they_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(kernels, "works", lambda device, dtype, *program: dtype == torch.float16)
    monkeypatch.delenv("TOMADIFF_KERNELS", raising=False)
    assert session.kernels_run("cpu", torch.float16) and not session.kernels_run("cpu", torch.float32)
    monkeypatch.setenv("TOMADIFF_KERNELS", "0")
    assert not session.kernels_run("cpu", torch.float16)


def test_resuming_keeps_finished_rounds_and_adds_the_missing_ones(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    ours = "tomadiff:refresh_weights=6"
    command = [*SMALL, "--methods", "dense", ours, "--no-count", "--json", str(file)]
    assert main([*command, "--repeats", "2"]) == 0
    first = json.loads(file.read_text())["runs"]
    # half a round is no round
    content = json.loads(file.read_text())
    content["runs"] = content["runs"][:-1]
    file.write_text(json.dumps(content))
    assert main([*command, "--repeats", "3", "--resume"]) == 0
    second = json.loads(file.read_text())["runs"]
    assert second[:2] == first[:2] and second[2:4] != first[2:]
    assert [r["round"] for r in second] == [0, 0, 1, 1, 2, 2]
    assert all({second[i]["method"], second[i + 1]["method"]} == {"dense", ours} for i in (0, 2, 4))
    assert json.loads(file.read_text())["keep_steps"][ours] == 6


def test_rounds_with_other_methods_are_not_added_to_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    command = [*SMALL, "--repeats", "1", "--no-count", "--json", str(file), "--methods", "dense"]
    assert main(command) == 0
    before = file.read_text()
    assert main(command) == 2
    assert "bench.json exists: add --resume" in capsys.readouterr().err
    assert main([*command, "tomadiff", "--resume"]) == 2
    assert "take another --json" in capsys.readouterr().err
    assert file.read_text() == before


def test_without_a_choice_all_methods_that_can_run_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--repeats", "1", "--no-count"]) == 0
    out = capsys.readouterr().out
    assert "| tomadiff | 0.5 |" in out and "| tomesd | 0.5 |" in out and "todo" not in out


def test_the_ideal_of_a_method_has_the_same_sites() -> None:
    assert figures.ideal_of("tomadiff:shift=True,dense_blocks=1") == "ideal:dense_blocks=1"
    assert figures.ideal_of("tomadiff:shift=True") == figures.ideal_of("tome") == "ideal"
    runs = [run("dense", 0, 0, 1.0), run("ideal", 0.5, 0, 0.5), run("tomadiff:dense_blocks=1", 0.5, 0, 0.6)]
    assert "of_ideal" not in figures.rows(runs, [], {})[2]


def test_a_saving_that_is_next_to_nothing_has_no_shares() -> None:
    runs = [run("dense", 0, 0, 1.0), run("ideal", 0.5, 0, 0.99), run("tomadiff", 0.5, 0, 1.2)]
    assert figures.rows(runs, [], {})[2]["of_ideal"] is None


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("tomadiff+tome", "merges twice"),
        ("tomadiff:where", "can't read"),
        ("tomesd:max=3", "unknown setting 'max'"),
        ("tomesd:sx=two", "sx is no word, but something like 2"),
        ("first-block", "no caches for"),
    ],
)
def test_methods_that_make_no_sense_are_refused(method: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pairs([method], [0.5], unet.FAMILY)


def test_settings_are_read_like_a_call() -> None:
    assert parse("tome:modules=('self', 'mlp'),where=module,shift=True") == (
        "tome",
        {"modules": ("self", "mlp"), "where": "module", "shift": True},
    )


def test_caches_take_part_in_whole_generations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--model", "emoji-flux", "--size", "32", "--repeats", "1"]
    methods = ["dense", "first-block:threshold=0.5", "first-block:threshold=0.5+tomadiff"]
    assert main([*command, "--methods", *methods]) == 2
    assert "add --steps" in capsys.readouterr().err
    assert main([*command, "--steps", "4", "--methods", *methods]) == 0
    assert "| first-block:threshold=0.5+tomadiff | 0.5 |" in capsys.readouterr().out


def test_rivals_take_part_in_whole_generations_with_their_counted_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "--model", "emoji-unet", "--size", "32", "--repeats", "1", "--steps", "4"]
    ours = ["tomadiff:interval=[0, 1, 3]", "tomadiff"]
    methods = ["dense", "steps:2,solver=dpm++", "deepcache:interval=2", *ours]
    file = tmp_path / "bench.json"
    assert main([*command, "--methods", *methods, "--json", str(file)]) == 0
    assert "| steps:2,solver=dpm++ | - |" in capsys.readouterr().out
    content = json.loads(file.read_text())
    work = {row["method"]: row["work"] for row in content["rows"]}
    assert (work["dense"], work[methods[1]], work[methods[3]]) == (1, 0.5, 0.75)
    assert 0.5 < work["deepcache:interval=2"] < 1 and 0.5 < work["tomadiff"] < 1
    assert content["settings"]["deepcache:interval=2"]["branch"] == 0


@pytest.mark.parametrize(
    "wrong", [{"about": None}, {"counts": "x"}, {"runs": [{"seconds": "x"}]}, {"runs": [{"seconds": 0}]}]
)
def test_a_record_that_was_tampered_with_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    record = Record({}, [run("dense", 0, 0, 1.0)])
    record.save(tmp_path / "bench.json")
    Record({}).resume(tmp_path / "bench.json")
    content = json.loads((tmp_path / "bench.json").read_text())
    runs = [content["runs"][0] | each for each in wrong.get("runs", [{}])]
    (tmp_path / "bench.json").write_text(json.dumps(content | wrong | {"runs": runs}))
    with pytest.raises(ValueError, match="no record of a benchmark"):
        Record({}).resume(tmp_path / "bench.json")


@pytest.mark.parametrize(
    ("content", "arguments", "says"),
    [
        ("{", [], "no record of a benchmark"),
        ('{"runs": [{"size": 5}]}', [], "no record of a benchmark"),
        (None, ["--batch", "2"], "batch was 1"),
    ],
)
def test_resuming_from_something_else_is_refused(
    tmp_path: Path,
    content: str | None,
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "bench.json"
    command = [*SMALL, "--methods", "dense", "--repeats", "1", "--no-count", "--json", str(file)]
    if content is None:
        assert main(command) == 0
    else:
        file.write_text(content)
    before = file.read_text()
    assert main([*command, "--resume", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert file.read_text() == before


def test_an_interrupt_prints_and_keeps_what_is_finished(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command = [*SMALL, "--methods", "dense", "tomadiff", "--no-count", "--repeats", "900"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tomadiff.tools.cli", *command, "--json", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs us may ignore it
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    deadline = time.monotonic() + 300
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "interrupted" in err and "| 32 x 32 | tomadiff | 0.5 |" in out
    runs = json.loads(file.read_text())["runs"]
    assert len(runs) >= 2 and len(runs) % 2 == 0


def test_whole_generations_are_timed_with_all_that_belongs_to_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    command = [
        *SMALL,
        "--protocol",
        "paper",
        "--steps",
        "3",
        "--repeats",
        "1",
        "--no-count",
        "--json",
        str(file),
    ]
    methods = ["dense", "tomadiff", "tomadiff:interval=2", "tomesd"]
    assert main([*command, "--methods", *methods]) == 0
    out = capsys.readouterr().out
    assert "s / image" in out and "generation of 3 steps" in out
    content = json.loads(file.read_text())
    assert {run["ratio"] for run in content["runs"]} == {0.0, 0.25, 0.5, 0.75}, "the paper's ratios"
    assert set(content["keep_steps"].values()) == {1}, "nothing is added later"


def test_the_paper_has_its_own_number_of_steps() -> None:
    from argparse import ArgumentParser

    from tomadiff.tools.arguments.bench import add_arguments
    from tomadiff.tools.bench import command

    parser = ArgumentParser()
    add_arguments(parser)
    for model, steps in (("sdxl", 50), ("flux-dev", 35)):
        args = parser.parse_args(["--model", model, "--protocol", "paper"])
        command.resolve_arguments(args)
        assert (args.steps, args.repeats, args.size) == (steps, 100, [(1024, 1024)])
        assert args.ratio == [0.25, 0.5, 0.75]


def test_expectations_need_no_weights(capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["--methods", "auto", "steps:14", "ideal", "tomadiff", "taylorseer"]
    command = ["bench", "--model", "flux-dev", "--expect", "--steps", "28", "--size", "768x1024", *methods]
    assert main(command) == 0
    out, told = capsys.readouterr()
    assert "28 steps of the denoiser: expected, not measured" in out
    assert "| RTX 4090 |" in out and "tomadiff at 0.5" in out
    assert "taylorseer is left out" in told and "taylorseer" not in out
    rows = [line.split("|") for line in out.splitlines() if line.startswith("| A100")]
    assert len(rows) == 2, "eager and compiled"
    for cells in rows:
        auto, fewer, ideal, ours = (int(re.findall(r"-?\d+", cell)[0]) for cell in cells[3:7])
        assert 45 <= auto <= fewer == 50, "auto runs 15 of 28 steps"
        assert 40 < ours <= ideal < 60


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--repeats", "0"], "at least 1"),
        (["--batch", "-1"], "at least 1"),
        (["--resume"], "--json"),
        (["--depth", "0.5"], "is built already"),
        (["--json", "/nowhere/x.json"], "no folder"),
        (["--csv", "."], "it is a folder"),
        (["--plot", "x.svg", "--methods", "dense", "tomadiff"], "is a PNG"),
        (["--model", "sdxl", "--methods", "tomadiff:ratio={16: 0.5}"], "it has 2, 4, 'block'"),
        (["--methods", "tomadiff:ratios=1"], "did you mean 'ratio'"),
        (["--methods", "tomadiff:interval=2"], "add --steps"),
        (["--methods", "todo"], "whole factors"),
        (["--model", "flux-dev", "--methods", "tomesd"], "tomesd knows UNets only"),
        (["--model", "sd15", "--depth", "0.5"], "leaves out no block"),
        (["--expect"], "--expect knows"),
        (["--model", "sdxl", "--expect", "--json", "x.json"], "leave out --json"),
        (["--repeats", "5000"], "at most"),
        (["--plot", "x.png", "--methods", "tomadiff"], "add it to --methods"),
        (["--model", "flux-dev", "--methods", "first-block", "--steps", "3"], "random weights"),
        (
            ["--model", "no/such"],
            "no hub id within reach, and none of sd15, ",
        ),
        (["--device", "cuda:7"], "can't use device"),
    ],
    ids=str,
)
def test_mistakes_are_told_before_anything_is_built(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main([*SMALL, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_plots_of_one_ratio_and_one_size_work(tmp_path: Path) -> None:
    runs = [run("dense", 0, 0, 1.0), run("tomadiff", 0.5, 0, 0.5, 0.0), run("ideal", 0.5, 0, 0.4, 0.0)]
    plot(figures.rows(runs, [], {}), "title", tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as picture:
        assert statistics.pstdev(picture.convert("L").resize((32, 32)).getdata()) > 1


def test_plots_of_several_sizes_need_no_ratio(tmp_path: Path) -> None:
    """As of ratios by level, which count as none."""
    runs = [
        replace(run(method, 0, 0, 1.0), size=size)
        for method in ("dense", "other")
        for size in ((8, 8), (9, 9))
    ]
    plot(figures.rows(runs, [], {}), "title", tmp_path / "plot.png")
    Image.open(tmp_path / "plot.png").verify()


# -- torch.compile -----------------------------------------------------------------------------------------


def test_compiling_is_part_of_the_benchmark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By inductor, which has tests of its own and takes a minute: here, by something quicker."""
    assert inspect.signature(compiled_contenders).parameters["backend"].default == "inductor"
    monkeypatch.setattr(session, "compiled_contenders", partial(compiled_contenders, backend="aot_eager"))
    before = graphs()
    blocks = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 1}
    EmojiFluxPipeline.untrained(PatchCodec(), **blocks).save_pretrained(tmp_path)
    tiny = ["bench", "--model", str(tmp_path), "--size", "32"]
    assert main([*tiny, "--compile", "--repeats", "1", "--no-count", "--methods", "tomadiff"]) == 0
    assert "compile True" in capsys.readouterr().out
    assert graphs() > before


def compiled_rounds(pipe: Any, made: list[tuple[Contender, Any]]) -> list[list[Run]]:
    step = capture(pipe, models.arguments(pipe, (64, 64), guidance=1.0))
    entries = [replace(entry, call=replace(step, model=denoiser(own))) for entry, own in made]
    cpu = torch.device("cpu")
    return list(rounds(None, entries, (64, 64), [0, 1], cpu, False, lambda progress: None))


def test_nothing_is_compiled_once_everybody_is_warm() -> None:
    pipe, todo = shallow("flux"), [("dense", 0.0), ("tomadiff", 0.5), ("tomadiff", 0.25), ("ideal", 0.5)]
    weights = {name: weight.data_ptr() for name, weight in denoiser(pipe).named_parameters()}
    with compiled_contenders(pipe, False, todo, lambda own, method: None, backend="eager") as made:
        before = graphs()
        assert len(compiled_rounds(pipe, made)) == 2
        assert graphs() - before == len(todo)
        for _, own in made:
            assert weights == {name: w.data_ptr() for name, w in denoiser(own).named_parameters()}
    assert not any(hasattr(denoiser(own), "_tomadiff") for _, own in made)


def test_a_call_that_was_timed_while_something_was_compiled_is_an_error() -> None:
    """As every call was, when contenders took turns on one compiled model."""
    torch.compiler.reset()
    pipe = shallow("flux")
    denoiser(pipe).compile(backend="eager")
    made = [(contender(denoiser(pipe), None, "tomadiff", 0.5), pipe)]
    with pytest.raises(ValueError, match="compiled something inside a timed call"):
        compiled_rounds(pipe, made)


# -- the selection loop ------------------------------------------------------------------------------------


def test_the_loop_that_is_compared_chooses_as_well(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = selection.smooth(selection.Size("", 3, 25))
    ours, plain = (
        torch.stack([s[:, picks].amax(1).sum() for s, picks in zip(known, choose(known, 9))])
        for choose in (facility_location, selection.plain)
    )
    torch.testing.assert_close(ours, plain, rtol=1e-3, atol=0)  # ties may be broken another way
    monkeypatch.setattr(selection, "SIZES", selection.SIZES[3:4])
    selection.main(["--rounds", "1"])
    assert "| 16 | 64 | SDXL, 32 x 32 tokens | " in capsys.readouterr().out
