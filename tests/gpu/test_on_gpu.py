"""What `tomadiff selftest` looks at, on the GPU that is here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device here", allow_module_level=True)

from tomadiff.tools.selftest.command import CHECKS
from tomadiff.tools.selftest.finding import Check

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_self_test_finds_nothing_wrong(check: Check) -> None:
    findings = list(check(DEVICE))
    assert findings
    assert [str(finding) for finding in findings if finding.good is False] == []


def test_kernels_equal_core_on_the_device() -> None:
    """All that is tried in the interpreter elsewhere. In a process of its own, as there."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "interpreted_kernels.py"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TOMADIFF_TEST_DEVICE": "cuda"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
