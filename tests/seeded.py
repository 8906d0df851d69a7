"""Inputs of tiny models: what a sample gets depends on its own seed alone."""

from __future__ import annotations

import torch
from torch import Tensor


def noise(seeds: tuple[int, ...], *shape: int) -> Tensor:
    """[B, *shape]"""
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def text(seeds: tuple[int, ...], *shape: int) -> Tensor:
    """Embeddings of made-up prompts, [B, *shape]"""
    return noise(tuple(1000 + seed for seed in seeds), *shape)


def times(seeds: tuple[int, ...], time: float) -> Tensor:
    """[B]"""
    return torch.full((len(seeds),), time)


def positions(*grid: int) -> Tensor:
    """Where each token of a grid is, [N, axes]"""
    axes = torch.meshgrid(*(torch.arange(float(side)) for side in grid), indexing="ij")
    return torch.stack([axis.flatten() for axis in axes], dim=-1)
