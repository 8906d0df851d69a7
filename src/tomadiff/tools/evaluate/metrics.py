"""Fidelity of one picture to another: [B, 3, H, W] in [0, 1] against the same, a number for each.

And of one set of pictures to another: FID, from the statistics of their features.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tomadiff.runtime.files import atomic_write

# what numpy raises for a file that is something else, or cut short
UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, EOFError, BadZipFile, zlib.error)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Peak signal to noise ratio in dB, [B]; infinite for equal pictures."""
    return -10 * (a - b).double().square().mean((1, 2, 3)).log10()


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity (Wang et al. 2004), [B]: Gaussian window of 11 x 11, sigma 1.5, each channel."""
    offsets = torch.arange(11, dtype=torch.float64) - 5
    weights = torch.exp(-(offsets**2) / (2 * 1.5**2))
    weights = (weights / weights.sum()).expand(a.shape[1], 1, 1, 11)

    def mean(x: Tensor) -> Tensor:  # one axis after the other: 22 products for each pixel instead of 121
        return F.conv2d(F.conv2d(x, weights, groups=x.shape[1]), weights.mT, groups=x.shape[1])

    a, b = a.double().cpu(), b.double().cpu()
    mean_a, mean_b = mean(a), mean(b)
    variance_a, variance_b = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2
    covariance = mean(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    score = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return (score / ((mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2))).mean((1, 2, 3))


@dataclass(frozen=True)
class Statistics:
    """Mean [C] and covariance [C, C] of a set of features, in float64: all that FID looks at."""

    mean: Tensor
    covariance: Tensor
    n: int | None = None  # how many features; a file may not say

    @classmethod
    def of(cls, batches: Iterable[Tensor]) -> Statistics:
        """Accumulated over batches [B, C] (Chan et al. 1979: no difference of large sums)."""
        n, mean, scatter = 0, torch.zeros(()), torch.zeros(())
        for batch in batches:
            batch = batch.double().cpu()
            batch_mean = batch.mean(0)
            shift, centred = batch_mean - mean, batch - batch_mean
            total = n + len(batch)
            scatter = scatter + centred.T @ centred + torch.outer(shift, shift) * (n * len(batch) / total)
            mean = mean + shift * (len(batch) / total)
            n = total
        if n < 2:
            raise ValueError(f"the covariance of {n} features: there must be at least 2")
        return cls(mean, scatter / (n - 1), n)

    @classmethod
    def load(cls, path: Path) -> Statistics:
        """From a .npz with `mu` and `sigma`, as pytorch-fid writes it."""
        try:
            with np.load(path, allow_pickle=False) as file:
                mean, covariance = (torch.from_numpy(file[key]).double() for key in ("mu", "sigma"))
                n = int(file["n"]) if "n" in file else None
        except FileNotFoundError:
            raise
        except UNREADABLE as error:
            raise ValueError(f"{path} is not a .npz with statistics `mu` and `sigma`: {error}") from error
        if mean.ndim != 1 or covariance.shape != 2 * mean.shape:
            shapes = f"a mean {list(mean.shape)} and a covariance {list(covariance.shape)}"
            raise ValueError(f"{path} has {shapes}: they don't belong together")
        if not (mean.isfinite().all() and covariance.isfinite().all()):
            raise ValueError(f"{path} has statistics that are not finite")
        return cls(mean, covariance, n)

    def save(self, path: Path) -> None:
        more: dict[str, Any] = {} if self.n is None else {"n": self.n}

        def write(partial: Path) -> None:
            with partial.open("wb") as file:  # a name would get another ending
                np.savez(file, mu=self.mean.numpy(), sigma=self.covariance.numpy(), **more)

        atomic_write(path, write)


def fid(a: Statistics, b: Statistics) -> float:
    """Frechet distance of the two Gaussians (Heusel et al. 2017), squared as is usual.

    With A = F F^T, tr((A B)^1/2) is the sum of the roots of the eigenvalues of F^T B F, which is symmetric
    and has no negative ones but by rounding; so singular covariances, of fewer pictures than channels, are no
    problem. They make FID large, though: compare only numbers of equally many pictures.
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"FID of {len(a.mean)} channels against {len(b.mean)}: not from the same network")
    factor = _factor(a)
    overlap = torch.linalg.eigvalsh(factor.T @ b.covariance @ factor).clamp(min=0).sqrt().sum()
    distance = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * overlap
    return max(distance.item(), 0.0)  # equal sets are 0 up to rounding


def _factor(statistics: Statistics) -> Tensor:
    """F [C, R], where F F^T is the covariance; R is C, or n if there are fewer pictures than channels."""
    covariance, n = statistics.covariance, statistics.n
    if n is not None and n < len(covariance):
        # The rank is below n, so n random mixtures of the columns span all of them. Decomposing this small
        # part takes milliseconds, and the whole many seconds.
        mixture = torch.randn(len(covariance), n, generator=torch.Generator().manual_seed(0)).double()
        basis = torch.linalg.qr(covariance @ mixture).Q
        values, vectors = torch.linalg.eigh(basis.T @ covariance @ basis)
        if values.sum() >= (1 - 1e-9) * covariance.trace():  # else n, which a file may say, is wrong
            return basis @ vectors * values.clamp(min=0).sqrt()
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp(min=0).sqrt()
