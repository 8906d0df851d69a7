"""Choosing destinations: greedy facility location."""

from __future__ import annotations

import torch
from torch import Tensor

CHOSEN = -1e9  # far below any sum of cosines, so a token that carries it is never the best
# Two tokens that are each other's nearest gain exactly the same, and rounding, which differs with the batch
# size, must not decide between them. So each token is worth a little less than the one before, but more
# than rounding.
TIE = 2e-6


def facility_location(similarity: Tensor, k: int, real: Tensor | None = None) -> Tensor:
    """The k tokens of each region that represent it best, in the order they were picked.

    Greedily maximises f(D) = sum_j max_{i in D} S_ij, which is within 1 - 1/e of the best set of that size.

    similarity: [G, n, n], symmetric, fp32. real: [G, n] bool, False for padding, which is never picked
    while a real token is left. Returns [G, k]. Ties go to the first token.

    `cover[i, j] = max(S_ij, m_j)`, with m_j the similarity of j to its nearest pick so far, is all the
    state there is: row sums are f(D + i), and the row of the pick is the next m. (All less 1, so that sums
    are of small numbers where it matters.) One more column breaks ties and marks the tokens that can't be
    picked, or not again. That makes five launches a pick, on buffers that are made once.
    """
    groups, n, _ = similarity.shape
    cover = similarity.new_empty(groups, n, n + 1)
    torch.sub(similarity, 1, out=cover[..., :n])
    cover[..., n] = torch.arange(n, dtype=similarity.dtype, device=similarity.device) * -TIE
    if real is not None:
        cover[..., n].masked_fill_(~real, CHOSEN)
        cover[..., :n].masked_fill_(~real[:, None, :], 0)  # nobody gains by covering padding
    value = similarity.new_empty(groups, n)
    picks = torch.empty(k, groups, dtype=torch.long, device=similarity.device)
    nearest = similarity.new_empty(groups, 1, n + 1)
    mark = similarity.new_full((groups, 1), CHOSEN)
    for pick in picks:
        torch.sum(cover, dim=-1, out=value)
        torch.argmax(value, dim=-1, out=pick)
        row = pick[:, None]
        cover[..., n].scatter_(1, row, mark)
        torch.gather(cover, 1, row[..., None].expand(-1, -1, n + 1), out=nearest)
        torch.maximum(cover, nearest, out=cover)
    return picks.T
