"""Choosing destinations: greedy facility location."""

from __future__ import annotations

import torch
from torch import Tensor

CHOSEN = -1e9  # far below any sum of cosines, so a token that carries it is never the best
# Two tokens that are each other's nearest gain exactly the same, and rounding, which differs with the batch
# size, must not decide between them. So each token is worth a little less than the one before, but more
# than rounding.
TIE = 2e-6
CACHE = 2**20  # bytes of similarities at a time, which stay in the second-level cache of a CPU
LARGE = 512  # tokens in a region, of which a pick changes so few that a CPU had better look for these
NONE, ALL = -2.0, 2.0  # less and more than any cosine


def facility_location(similarity: Tensor, k: int, real: Tensor | None = None) -> Tensor:
    """The k tokens of each region that represent it best, in the order they were picked.

    Greedily maximises f(D) = sum_j max_{i in D} S_ij, which is within 1 - 1/e of the best set of that size.

    similarity: [G, n, n], symmetric, fp32. real: [G, n] bool, False for padding, which is never picked
    while a real token is left. Returns [G, k]. Ties go to the first token.
    """
    groups, n, _ = similarity.shape
    if similarity.device.type != "cpu":
        return _by_sums(similarity, real, k)
    parts = groups if n > LARGE else max(1, similarity.nbytes // CACHE)
    pick = _by_changes if n > LARGE else _by_sums
    masks = [None] * parts if real is None else real.tensor_split(parts)
    return torch.cat([pick(part, mask, k) for part, mask in zip(similarity.tensor_split(parts), masks)])


def _by_sums(similarity: Tensor, real: Tensor | None, k: int) -> Tensor:
    """All of f anew for each pick: [G, n, n] -> [G, k].

    `cover[j, g, i] = max(S_ij, m_j)`, with m_j the similarity of j to its nearest pick so far, is all the
    state there is: sums over j are f(D + i), and where i is the pick, there is the next m. (All less 1, so
    that sums are of small numbers where it matters.) One more j breaks ties and marks the tokens that can't
    be picked, or not again. That makes five launches a pick, on buffers that are made once, and with j
    first, sums and maxima go over memory as it lies.
    """
    groups, n, _ = similarity.shape
    cover = similarity.new_empty(n + 1, groups, n)
    tokens, worth = cover[:n], cover[n]
    torch.sub(similarity.transpose(0, 1), 1, out=tokens)
    worth.copy_(torch.arange(n, dtype=cover.dtype, device=cover.device) * -TIE)
    if real is not None:
        worth.masked_fill_(~real, CHOSEN)
        tokens.masked_fill_(~real.T[..., None], 0)  # nobody gains by covering padding
    value = similarity.new_empty(groups, n)
    picks = torch.empty(k, groups, dtype=torch.long, device=similarity.device)
    nearest = similarity.new_empty(n, groups, 1)
    mark = similarity.new_full((groups, 1), CHOSEN)
    for pick in picks:
        torch.sum(cover, dim=0, out=value)
        torch.argmax(value, dim=-1, out=pick)
        worth.scatter_(1, pick[:, None], mark)
        torch.gather(tokens, 2, pick[None, :, None].expand(n, -1, 1), out=nearest)
        torch.maximum(tokens, nearest, out=tokens)
    return picks.T


def _by_changes(similarity: Tensor, real: Tensor | None, k: int) -> Tensor:
    """f kept from pick to pick, for one region: [1, n, n] -> [1, k].

    Only tokens that are nearer to the pick than to all before it change f(D + i), by what max(S_ij, m_j)
    becomes more. That is added up in fp64: what is wrong in it would stay there to the end.
    """
    similarity, n = similarity[0], similarity.shape[1]
    value = torch.arange(n, dtype=torch.float64) * -TIE
    nearest = similarity.new_full((n,), NONE)
    if real is not None:
        value.masked_fill_(~real[0], CHOSEN)
        nearest.masked_fill_(~real[0], ALL)  # nobody gains by covering padding
    for part in (nearest == NONE).nonzero()[:, 0].split(LARGE):
        value += similarity[part].sum(0, dtype=torch.float64)
    picks = []
    for _ in range(k):
        picks.append(int(value.argmax()))
        row = similarity[picks[-1]]
        for part in (row > nearest).nonzero()[:, 0].split(LARGE):
            rows = similarity[part]
            more = torch.maximum(rows, row[part, None]).sub_(rows.maximum(nearest[part, None]))
            value += more.sum(0, dtype=torch.float64)
        nearest = torch.maximum(nearest, row)
        value[picks[-1]] = CHOSEN
    return torch.tensor([picks])
