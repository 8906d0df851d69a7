"""The report says what happened."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from diffusers import DiffusionPipeline
from pipelines import bare_call, denoiser, draw, make

import tomadiff
from tomadiff.tools.cli import main, parser


def test_report_counts_tokens_calls_and_time(pipe: DiffusionPipeline) -> None:
    tomadiff.apply(pipe, ratio=0.5)
    draw(pipe, steps=3, guidance=1.0)
    report = tomadiff.report(pipe)
    assert report.sites and len({site.name for site in report.sites}) == len(report.sites)
    for site in report.sites:
        assert (site.kept, site.calls, site.dense_calls) == (site.tokens // 2, 3, 0)
    assert report.model_calls == report.steps == {"run": 3, "forecast": 0}
    assert all(report.seconds[part] > 0 for part in ("plan", "merge", "unmerge"))
    assert sum(report.seconds[part] for part in ("plan", "merge", "unmerge")) < report.seconds["model"]
    assert 0 < report.overhead < 1


def test_report_counts_only_sites_that_ran() -> None:
    """Some guidance leaves out blocks of SD3, in some calls of those that are alike otherwise."""
    model = denoiser(make("sd3"))
    tomadiff.apply(model, ratio=0.5, where="block", dense_blocks=0)
    with torch.no_grad():
        for skipped in ([0], [], [0, 1], [0, 1]):
            model(**bare_call(model), skip_layers=skipped)
    assert [site.calls for site in tomadiff.report(model).sites] == [1, 2, 4]


def test_report_has_the_tokens_of_the_last_merged_step_though_the_last_steps_are_dense() -> None:
    pipe = tomadiff.apply(make("sd1"), ratio=[(0, 0.5), (2, 0)])
    draw(pipe, steps=3)
    assert {(site.dense_calls, site.kept / site.tokens) for site in tomadiff.report(pipe).sites} == {(1, 0.5)}


def test_report_is_plain_data_that_json_takes(pipe: DiffusionPipeline) -> None:
    tomadiff.apply(pipe, ratio=0.5)
    draw(pipe)
    data = json.loads(json.dumps(tomadiff.report(pipe).to_dict()))
    assert data["settings"]["ratio"] == 0.5
    assert data["sites"][0].keys() >= {"name", "kind", "tokens", "kept", "calls"}
    assert data["refreshes"]["destinations"] > 0


def test_report_prints_a_table_with_a_row_for_sites_that_are_alike() -> None:
    pipe = tomadiff.apply(make("sd1"), ratio=0.5, dense_blocks=0)
    assert "not called yet" in str(tomadiff.report(pipe))
    draw(pipe)
    lines = str(tomadiff.report(pipe)).splitlines()
    assert "ratio=0.5" in lines[0]
    assert lines[1] == "1 generation: 2 steps run, 0 forecast"
    assert lines[2].split() == ["kind", "level", "sites", "tokens", "kept", "calls", "left", "dense"]
    assert lines[3].split() == ["block", "1", "3", "256", "128", "6", "0"]
    assert lines[4].split() == ["block", "2", "4", "64", "32", "8", "0"]
    assert "% of the model's" in lines[-1]


def test_the_public_names_are_these() -> None:
    names = ["Config", "Sites", "apply", "families", "forget", "merged", "remove", "report"]
    assert sorted(tomadiff.__all__) == names


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["families"], 0, "UNet2DConditionModel"),
        (["--version"], 0, tomadiff.__version__),
        (["bench", "--ratio", "1.5"], 2, "below 1"),
        (["bench", "--methods", "tomata"], 2, "unknown method"),
        (["nonsense"], 2, "invalid choice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_command_answers_in_one_line_and_a_code(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        answer = main(arguments)
    except SystemExit as ended:  # of argparse
        answer = ended.code
    assert answer == code
    assert says in "".join(capsys.readouterr())


def test_every_option_says_what_it_is() -> None:
    (commands,) = (action.choices for action in parser()._actions if isinstance(action.choices, dict))
    mute = [
        f"{name} {action.dest}"
        for name, command in commands.items()
        for action in command._actions
        if not action.help
    ]
    assert mute == []


def test_families_fit_into_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["families"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert all(model in printed for family in tomadiff.families() for model in family.models)


def test_a_reader_that_has_seen_enough_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["families"]) == 141
    assert capsys.readouterr().err == ""
