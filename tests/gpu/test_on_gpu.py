"""What `tomadiff selftest` looks at, on the GPU that is here."""

from __future__ import annotations

import pytest
import torch
from kernel_process import assert_kernel_tests_pass

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
    assert_kernel_tests_pass(TOMADIFF_TEST_DEVICE="cuda")
