"""The command: run all checks within a time limit, print a verdict, and write a file for an issue."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tomadiff.errors import reason
from tomadiff.runtime.files import atomic_write, check_writable
from tomadiff.runtime.machine import processor, versions
from tomadiff.tools.loading import check_device

from .compiled import (
    compiled_model_equals_core,
    compiled_pictures_are_close,
    compiled_pictures_in_other_modes,
)
from .finding import LEFT_OUT, Check, Finding, dtypes_of, left_out, name_of, time_is_over, time_limit
from .kernels import kernels_equal_core, time_of_a_launch
from .pictures import pictures_are_close, steps_dont_wait_for_the_device
from .speed import speed

# the cheap and important ones first: at the end of the time, the others are left out
CHECKS: tuple[Check, ...] = (
    kernels_equal_core,
    time_of_a_launch,
    compiled_model_equals_core,
    pictures_are_close,
    steps_dont_wait_for_the_device,
    compiled_pictures_are_close,
    speed,
    compiled_pictures_in_other_modes,
)


def run(args: argparse.Namespace) -> int:
    """Run the self-test; returns exit status 0 if a check passed and none failed, else 1."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_device(str(device))
    if args.json:
        check_writable(args.json)
    facts = about(device)
    print(*(f"{name}: {value}" for name, value in facts.items()), sep="\n", end="\n\n")
    findings = examine(device, args.seconds, CHECKS)
    told = verdict(findings)
    print(f"\n{told}")
    if args.json:
        content = {"about": facts, "verdict": told, "findings": [asdict(finding) for finding in findings]}
        atomic_write(args.json, lambda partial: partial.write_text(json.dumps(content, indent=1)))
        print(f"All of it is in {args.json}, to be pasted into an issue.")
    results = {finding.good for finding in findings}
    return 0 if True in results and False not in results else 1


def examine(device: torch.device, seconds: float, checks: Sequence[Check]) -> list[Finding]:
    """Run checks and print each finding at once. A check that raises an exception is a failure."""
    findings = []

    def tell(finding: Finding) -> None:
        print(finding, flush=True)
        findings.append(finding)

    with time_limit(seconds):
        for check in checks:
            name = check.__name__.replace("_", " ")
            if time_is_over():
                tell(left_out(name))
                continue
            try:
                for finding in check(device):
                    tell(finding)
            except Exception as error:
                tell(Finding(name, False, f"broke off: {reason(error)}"))
    return findings


def verdict(findings: Sequence[Finding]) -> str:
    wrong = [finding.name for finding in findings if finding.good is False]
    right = sum(finding.good is True for finding in findings)
    late = [finding.name for finding in findings if finding.words == LEFT_OUT]
    untried = sum(finding.good is None and not finding.figures for finding in findings) - len(late)
    left = f" {untried} could not be tried here." if untried else ""
    if late:
        left += f" {len(late)} were left out, for which more --seconds are needed: {'; '.join(late)}."
    if wrong:
        return (
            f"NOT ALL IS WELL: {len(wrong)} of {len(wrong) + right} checks failed: {'; '.join(wrong)}.{left}"
        )
    if not right:
        return f"NOTHING WAS CHECKED.{left}"
    return f"ALL IS WELL: {right} checks passed.{left}"


def about(device: torch.device) -> dict[str, Any]:
    """Versions, the device and its free memory."""
    facts: dict[str, Any] = {
        **versions(),
        "torch build": torch.__version__,
        "triton": _version("triton"),
        "accelerate": _version("accelerate"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "processor": processor(device),
        "types": ", ".join(map(name_of, dtypes_of(device))),
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        facts |= {
            "compute capability": capability,
            "CUDA": torch.version.cuda,
            "free memory": f"{free / 2**30:.1f} of {total / 2**30:.1f} GB",
        }
    else:
        facts["threads"] = torch.get_num_threads()
    return facts


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
