"""Muon: momentum whose updates of matrices are made orthogonal, which learns in fewer steps than Adam."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration in Muon's reference implementation


def orthogonalised(matrices: Tensor, iterations: int = 5) -> Tensor:
    """[N, rows, columns], each with its singular values moved close to 1, by Newton-Schulz iterations."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """For weights of linear layers and convolutions; updates are as large as AdamW's at the same `lr`."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            alike: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.shape[0], p[0].numel()].append(p)
            for (rows, columns), parameters in alike.items():
                updates = [self._momentum(p, group["momentum"]).reshape(rows, columns) for p in parameters]
                scale = 0.2 * math.sqrt(max(rows, columns))
                for p, update in zip(parameters, orthogonalised(torch.stack(updates))):
                    p.sub_(update.view_as(p), alpha=group["lr"] * scale)

    def _momentum(self, p: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[p]
        if not state:
            state["average"] = torch.zeros_like(p)
        average = state["average"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(average, momentum)  # Nesterov's
