"""Runs `interpreted_kernels.py` in a process of its own: Triton reads its variables when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def assert_kernel_tests_pass(**environment: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "interpreted_kernels.py"],
        cwd=Path(__file__).parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
