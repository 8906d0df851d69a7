"""A plan: which tokens are destinations, and the two matrices that merge and unmerge."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .regions import Regions, Slots

# Noise variance, relative to a prior variance of 1; keeps the system solvable if merged tokens are alike.
REGRESSION_NOISE = 1e-3


class MergePlan(Protocol):
    """The interface that every method's plan implements."""

    @property
    def destinations(self) -> Tensor:
        """[B, K] token numbers, in the order of the merged sequence."""

    def merge(self, x: Tensor) -> Tensor:
        """Merge tokens in image order: [B, N, C] -> [B, K, C]."""

    def unmerge(self, y: Tensor, onto: Tensor | None = None, merged: Tensor | None = None) -> Tensor:
        """Unmerge into tokens in image order: [B, K, C] -> [B, N, C].

        With `onto` (the tokens before merging) and `merged` (after merging), only the change, y - merged, is
        unmerged and added to `onto`.
        """

    def owners(self) -> Tensor:
        """[B, N] for each token, the destination with its largest weight."""

    def log_sizes(self) -> Tensor:
        """[B, K] logarithm of the number of tokens that each merged token stands for."""


@dataclass(frozen=True)
class Plan:
    """Merging as attention: B samples with R regions of n tokens, k of which are destinations."""

    regions: Regions  # the regions of the assignment; a single one if tokens are assigned globally
    slots: Slots
    destinations: Tensor  # [B, K] token numbers, in the order of the merged sequence
    assignment: Tensor  # [B * R, k, n] fp32, A: weights of each token over the destinations; columns sum to 1
    merging: Tensor  # [B * R, k, n] M: rows sum to 1, so that a merged token is a weighted mean
    unmerging: Tensor  # [B * R, n, k] A^T, or a better inverse of M

    def merge(self, x: Tensor) -> Tensor:
        split = self.regions.split(self.regions.arrange(x))
        return self.slots.pack(torch.bmm(_in_dtype_of(x, self.merging), split))

    def unmerge(self, y: Tensor, onto: Tensor | None = None, merged: Tensor | None = None) -> Tensor:
        y = self.slots.unpack(y if onto is None else y - merged)
        unmerging = _in_dtype_of(y, self.unmerging)
        if onto is None:
            x = torch.bmm(unmerging, y)
        else:
            split = self.regions.split(self.regions.arrange(_in_dtype_of(y, onto)))
            x = torch.baddbmm(split, unmerging, y)
        return self.regions.restore(x.reshape(-1, self.regions.count * self.regions.size, y.shape[-1]))

    def cast(self, dtype: torch.dtype) -> Plan:
        """The plan with its matrices in the dtype of the tokens, which may differ from the features'."""
        if self.merging.dtype == dtype:
            return self
        return replace(self, merging=self.merging.to(dtype), unmerging=self.unmerging.to(dtype))

    def owners(self) -> Tensor:
        slots = self.assignment.argmax(1)  # [B * R, n]
        owners = self.slots.unpack(self.destinations).gather(1, slots)
        return self.regions.restore(owners.reshape(len(self.destinations), -1, 1)).squeeze(-1)

    def log_sizes(self) -> Tensor:
        # clamp: a destination whose tokens nearly all prefer other destinations must not become -inf
        return self.slots.pack(self.assignment.sum(-1)).clamp_min(1e-4).log()


def _in_dtype_of(x: Tensor, other: Tensor) -> Tensor:
    """`other`, cast if it has to be: even a cast that does nothing takes a microsecond of the host."""
    return other if other.dtype == x.dtype else other.to(x.dtype)


def destination_rows(
    destinations: Tensor, tokens: int, table: Tensor, axis: int = 0, before: int | None = None
) -> Tensor:
    """The rows of a per-token table that belong to the merged sequence.

    The table has entries for L tokens that are not merged, for the N image tokens, and for M more that are
    not merged; of the N, those of the K destinations are kept. If `axis` is 0:
    [L + N + M, ...] -> [B, L + K + M, ...]. Otherwise the first axis is the batch, of size 1 or B:
    [1, ..., L + N + M, ...] -> [B, ..., L + K + M, ...]. `before` is L; by default M is 0.
    """
    length = table.shape[axis]
    before = length - tokens if before is None else before
    return rows_at(places_in_table(destinations, tokens, length, before), table, axis)


def places_in_table(destinations: Tensor, tokens: int, length: int, before: int) -> Tensor:
    """The rows of the merged sequence in a table of this length: [B, K] -> [B, L + K + M]."""
    if length <= tokens:
        return destinations
    others = torch.arange(length, device=destinations.device).expand(len(destinations), -1)
    return torch.cat([others[:, :before], destinations + before, others[:, before + tokens :]], dim=1)


def rows_at(places: Tensor, table: Tensor, axis: int = 0) -> Tensor:
    """The rows of a table at these places, [B, S], for each sample; axes as in `destination_rows`."""
    if axis == 0:
        return table.index_select(0, places.flatten()).unflatten(0, places.shape)
    table = table.movedim(axis, 1)
    samples = torch.arange(len(places), device=places.device)[:, None]
    return (table[0][places] if len(table) == 1 else table[samples, places]).movedim(1, axis)


def unit_vectors(features: Tensor) -> Tensor:
    """Features [..., C] scaled to length 1, in fp32, since near cosine 1 the spacing of bf16 is 0.004."""
    return F.normalize(features.float(), dim=-1)


def similarity(unit: Tensor) -> Tensor:
    """Cosine similarity of unit vectors: [G, n, C] -> [G, n, n]."""
    return torch.bmm(unit, unit.transpose(1, 2))


def assign(
    unit: Tensor,
    picks: Tensor,
    scale: float,
    real_tokens: Tensor | None = None,
    real_slots: Tensor | None = None,
) -> Tensor:
    """A = softmax(scale * D X^T) over the destinations.

    unit: [G, n, C] unit vectors, picks: [G, k] indices of the destinations within their region. The masks,
    [G, n] and [G, k], are False for padded tokens and surplus slots, which get no weight. Returns [G, k, n].
    """
    chosen = unit.gather(1, picks[..., None].expand(-1, -1, unit.shape[-1]))
    logits = torch.bmm(chosen, unit.transpose(1, 2)).mul_(scale)
    if real_slots is not None:
        logits.masked_fill_(~real_slots[:, :, None], float("-inf"))
    # a sharp softmax is full of denormals, and CPUs multiply denormals fifteen times slower than zeros
    assignment = F.threshold(logits.softmax(dim=1), 1e-12, 0.0, inplace=True)
    return assignment if real_tokens is None else assignment * real_tokens[:, None, :]


def merging_matrix(assignment: Tensor) -> Tensor:
    """M: A with each row scaled to sum to 1. Rows of surplus slots stay zero."""
    return assignment / assignment.sum(-1, keepdim=True).clamp_min(1e-12)


def unmerging_matrix(assignment: Tensor, merging: Tensor, how: str) -> Tensor:
    """A^T ("transpose"), which is the pseudo-inverse of M if A is sharp, or the pseudo-inverse ("pinv").

    NaNs are replaced first: a single NaN would make `torch.linalg.pinv` fail for all regions.
    """
    if how == "transpose":
        return assignment.transpose(1, 2)
    return torch.linalg.pinv(merging.nan_to_num())


def regression_matrix(unit: Tensor, merging: Tensor, real_slots: Tensor | None = None) -> Tensor:
    """Unmerging as Gaussian-process regression (kriging): U = K(X, MX) (K(MX, MX) + noise)^-1.

    The module's output is known for the k merged tokens, that is, at k points in feature space. Each token's
    output is predicted from all of them instead of copied from the nearest. Rows sum to 1, since the prior is
    the mean over the region. K is a Gaussian kernel; its squared width is the mean squared distance between
    merged tokens.

    unit: [G, n, C] unit vectors, merging: [G, k, n], real_slots: [G, k] bool, False for surplus slots, which
    get no weight. Returns [G, n, k].
    """
    # centred, since otherwise rounding errors would be as large as the distances between similar tokens
    tokens = unit - unit.mean(1, keepdim=True)
    points = torch.bmm(merging, tokens)
    # squared distances of merged tokens to each other and to all tokens, in one product: planning is many
    # small operations, and a GPU pays for each
    both, k = torch.cat([points, tokens], 1), points.shape[1]
    squares = both.square().sum(-1)
    distances = torch.baddbmm(squares[:, None, :], points, both.transpose(1, 2), alpha=-2)
    distances = (distances + squares[:, :k, None]).clamp_min(0)
    noise = REGRESSION_NOISE * torch.eye(k, device=points.device)
    if real_slots is None:
        width = distances[..., :k].mean((1, 2), keepdim=True).clamp_min(1e-12)
        prior = 1 / k
    else:
        real = real_slots.to(merging.dtype)
        pairs = real[:, :, None] * real[:, None, :]
        total = (distances[..., :k] * pairs).sum((1, 2), keepdim=True)
        width = (total / pairs.sum((1, 2), keepdim=True)).clamp_min(1e-12)
        prior = (real / real.sum(-1, keepdim=True))[:, None, :]
    kernel = torch.exp(distances / (-2 * width))
    known, wanted = kernel[..., :k] + noise, kernel[..., k:]
    if real_slots is not None:
        known = known * pairs + torch.diag_embed(1 - real)
        wanted = wanted * real[:, :, None]
    # `torch.linalg.solve` would check for errors, which synchronises a GPU
    weights = torch.linalg.solve_ex(known, wanted).result.transpose(1, 2)
    return weights + (1 - weights.sum(-1, keepdim=True)) * prior
