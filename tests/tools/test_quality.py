"""Fidelity measures against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from tomadiff.tools.evaluate.metrics import psnr, ssim


def picture(seed: int) -> torch.Tensor:
    return torch.rand(2, 3, 24, 20, generator=torch.Generator().manual_seed(seed))


def test_psnr_of_a_known_error() -> None:
    a = torch.full((2, 3, 8, 8), 0.5)
    b = a.clone()
    b[1] += 0.1
    assert psnr(a, b).tolist() == [math.inf, pytest.approx(20.0, abs=1e-4)]


def test_ssim_is_one_for_equal_pictures_and_falls_with_noise() -> None:
    a = picture(0)
    torch.testing.assert_close(ssim(a, a), torch.ones(2, dtype=torch.float64))
    slight, strong = (ssim(a, (a + x * (picture(1) - 0.5)).clamp(0, 1)).mean() for x in (0.1, 0.8))
    assert 1 > slight > strong > 0


def test_ssim_equals_the_formula_on_a_single_window() -> None:
    a, b = picture(0)[:1, :1, :11, :11].double(), picture(1)[:1, :1, :11, :11].double()
    weights = torch.exp(-((torch.arange(11.0, dtype=torch.float64) - 5) ** 2) / 4.5)
    w = torch.outer(weights, weights)
    w /= w.sum()
    ma, mb = (w * a).sum(), (w * b).sum()
    va, vb, cov = (w * (a - ma) ** 2).sum(), (w * (b - mb) ** 2).sum(), (w * (a - ma) * (b - mb)).sum()
    expected = (2 * ma * mb + 1e-4) * (2 * cov + 9e-4) / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4))
    torch.testing.assert_close(ssim(a, b)[0], expected)
