"""A model of no library, as users bring theirs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """Attention and MLP of a home-made model, text first; tokens come back second."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, where: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        h = F.layer_norm(x, x.shape[-1:]) + shift
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q * where, k * where, v))
        return shift, x + self.mlp(F.layer_norm(x, x.shape[-1:]))


class HomeMade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(3, 16), nn.Linear(16, 3)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.heads = nn.ModuleList([nn.Linear(16, 16), nn.Conv2d(1, 1, 1)])

    def forward(self, picture: Tensor, words: Tensor, sigma: Tensor) -> Tensor:
        """picture: [B, 3, H, W]"""
        x = torch.cat([words, self.before(picture.flatten(2).transpose(1, 2))], dim=1)
        where = torch.linspace(0.5, 1.5, x.shape[1])[:, None].expand(-1, 16)  # for each token, its own
        for layer in self.layers:
            _, x = layer(x, where, shift=sigma[:, None, None])
        return self.after(x[:, words.shape[1] :]).transpose(1, 2).unflatten(2, picture.shape[2:])
