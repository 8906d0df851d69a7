"""Fidelity of one picture to another: [B, 3, H, W] in [0, 1] against the same, a number for each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Peak signal to noise ratio in dB, [B]; infinite for equal pictures."""
    return -10 * (a - b).double().square().mean((1, 2, 3)).log10()


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity (Wang et al. 2004), [B]: Gaussian window of 11 x 11, sigma 1.5, each channel."""
    offsets = torch.arange(11, dtype=torch.float64) - 5
    weights = torch.exp(-(offsets**2) / (2 * 1.5**2))
    window = torch.outer(weights, weights)
    window = (window / window.sum()).expand(a.shape[1], 1, 11, 11)

    def mean(x: Tensor) -> Tensor:
        return F.conv2d(x, window, groups=x.shape[1])

    a, b = a.double().cpu(), b.double().cpu()
    mean_a, mean_b = mean(a), mean(b)
    variance_a, variance_b = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2
    covariance = mean(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    score = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return (score / ((mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2))).mean((1, 2, 3))
