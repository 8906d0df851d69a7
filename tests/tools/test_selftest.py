"""The self-test: what it says when all is well, when something is wrong, and when time is over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tomadiff.tools.cli import main
from tomadiff.tools.selftest import command, kernels, pictures
from tomadiff.tools.selftest.finding import Finding

CPU = torch.device("cpu")


def good(device: torch.device) -> Iterator[Finding]:
    yield Finding("sums", True, "are right", {"error": 0.0})
    yield Finding("products", None, "can't be tried here")


def bad(device: torch.device) -> Iterator[Finding]:
    yield Finding("differences", False, "are wrong")


def broken(device: torch.device) -> Iterator[Finding]:
    yield from ()
    raise RuntimeError("no such kernel\nand much more")


@pytest.mark.parametrize(
    ("checks", "status", "told"),
    [
        ((good,), 0, "ALL IS WELL: 1 checks passed. 1 could not be tried here."),
        ((good, bad), 1, "NOT ALL IS WELL: 1 of 2 checks failed: differences."),
        ((broken,), 1, "NOT ALL IS WELL: 1 of 1 checks failed: broken."),
    ],
)
def test_the_verdict_is_in_words_in_the_exit_status_and_in_a_file(
    checks: tuple,
    status: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "CHECKS", checks)
    assert main(["selftest", "--device", "cpu", "--json", str(tmp_path / "found.json")]) == status
    printed = capsys.readouterr().out
    assert told in printed and f"torch build: {torch.__version__}" in printed
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["verdict"].startswith(told) and content["about"]["device"] == "cpu"
    assert len(content["findings"]) == len(
        [line for line in printed.splitlines() if ": " in line and "  " in line]
    )


def test_nothing_is_begun_after_the_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    findings = command.examine(CPU, 0.0, (good, bad))
    assert [finding.good for finding in findings] == [None, None]
    assert "--seconds" in capsys.readouterr().out


def test_a_gpu_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cuda:99"]) == 2
    assert "can't use device" in capsys.readouterr().err


def test_on_a_cpu_kernels_and_waiting_are_left_out_with_the_reason() -> None:
    findings = [*kernels.kernels_equal_core(CPU), *pictures.steps_dont_wait_for_the_device(CPU)]
    assert [finding.good for finding in findings] == [None, None]
    assert all("CUDA" in finding.words for finding in findings)


def test_a_picture_that_is_too_far_away_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "EMBEDDED", ["emoji-flux"])
    monkeypatch.setattr(pictures, "REQUEST", pictures.Request("pizza", steps=6))
    modes = {"merged": ({"ratio": 0.5}, 5.0), "forecast": ({"interval": 2}, 1000.0)}
    monkeypatch.setattr(pictures, "MODES", modes)
    found = list(pictures.pictures_are_close(CPU))
    assert [finding.good for finding in found] == [True, False]
    assert "expected are at least 1000" in found[1].words
