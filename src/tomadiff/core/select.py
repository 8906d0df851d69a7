"""Choosing destinations: greedy facility location."""

from __future__ import annotations

import torch
from torch import Tensor

CHOSEN = -1e9  # value of a token that can't be picked: far below any sum of cosines
# Two tokens that are each other's nearest have exactly the same gain, and rounding, which depends on the
# batch size, must not decide between them. So each token's value is reduced by TIE times its index; TIE is
# larger than the rounding error.
TIE = 2e-6
CACHE = 2**20  # bytes of similarities per chunk on a CPU, so that a chunk stays in the L2 cache
LARGE = 512  # in regions of more tokens, a pick changes few values, and a CPU is faster updating only those
NONE, ALL = -2.0, 2.0  # below and above any cosine


def facility_location(similarity: Tensor, k: int, real: Tensor | None = None) -> Tensor:
    """The k tokens that best represent each region, in the order in which they were picked.

    Greedily maximises f(D) = sum_j max_{i in D} S_ij, which gets within 1 - 1/e of the best set of that size.

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
    """Recompute f for every pick: [G, n, n] -> [G, k].

    The only state is `cover[j, g, i] = max(S_ij, m_j) - 1`, where m_j is the similarity of token j to its
    nearest pick so far. Its sum over j is f(D + i) up to a constant, and its slice at i = pick is the next m.
    (Subtracting 1 keeps the summands small, and their sum exact, near cosine 1.) One more row, j = n, breaks
    ties and marks the tokens that can't be picked (again). This takes five launches per pick on buffers that
    are allocated once; with j as the first axis, sums and maxima read memory contiguously.
    """
    groups, n, _ = similarity.shape
    cover = similarity.new_empty(n + 1, groups, n)
    tokens, worth = cover[:n], cover[n]
    torch.sub(similarity.transpose(0, 1), 1, out=tokens)
    worth.copy_(torch.arange(n, dtype=cover.dtype, device=cover.device) * -TIE)
    if real is not None:
        worth.masked_fill_(~real, CHOSEN)
        tokens.masked_fill_(~real.T[..., None], 0)  # covering padding gains nothing
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
    """Update f from pick to pick, for one region: [1, n, n] -> [1, k].

    Only tokens j that are nearer to the new pick than to all earlier ones change f(D + i), by the increase of
    max(S_ij, m_j). The increases are summed in fp64, since rounding errors would accumulate over all picks.
    """
    similarity, n = similarity[0], similarity.shape[1]
    value = torch.arange(n, dtype=torch.float64) * -TIE
    nearest = similarity.new_full((n,), NONE)
    if real is not None:
        value.masked_fill_(~real[0], CHOSEN)
        nearest.masked_fill_(~real[0], ALL)  # covering padding gains nothing
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
