"""A plan's matrices in one launch: assign tokens to destinations, merge, and unmerge by regression.

By default these are made anew in every step. core takes some forty small operations for that; here one
program does a region.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tomadiff.core import Regions, Slots
from tomadiff.core.plan import REGRESSION_NOISE

from . import block
from .launch import Launch, repeats_of, run
from .select import check_features

NOISE = tl.constexpr(REGRESSION_NOISE)
SLICE = tl.constexpr(16)  # channels, or columns of a matrix, per iteration; more would not fit in registers
VARYING = ("features", "destinations", "assignment", "merging", "unmerging", "scratch")


def weights(
    features: Tensor, regions: Regions, slots: Slots, destinations: Tensor, scale: float, regression: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The assignment, merging and unmerging matrices of `core.Plan`, for features in image order, [B, N, C].

    It replaces core's unit_vectors, assign, merging_matrix and regression_matrix; without `regression`,
    unmerging is the transposed assignment. Merging and unmerging have the dtype of the features.
    """
    check_features(features, regions)
    if destinations.shape != (len(features), slots.kept):
        expected = [len(features), slots.kept]
        raise ValueError(f"destinations {list(destinations.shape)}: there must be {expected}")
    features = features if features.stride(-1) == 1 else features.contiguous()
    groups, n, k = len(features) * regions.count, regions.size, slots.size
    places, padded_slots = block(n), block(k)
    inputs = (features, destinations.contiguous())
    outputs = (
        features.new_empty(groups, k, n, dtype=torch.float32),
        features.new_empty(groups, k, n),
        features.new_empty(groups, n, k),
        features.new_empty(groups, (places + 2 * padded_slots) * regression, places, dtype=torch.float32),
    )
    run(
        repeats_of(regions, slots),
        ("weights", scale, regression),
        VARYING,
        inputs,
        outputs,
        lambda: weights_launch(regions, slots, scale, regression, (*inputs, *outputs)),
    )
    return outputs[:3]


def weights_launch(
    regions: Regions, slots: Slots, scale: float, regression: bool, tensors: tuple[Tensor, ...]
) -> Launch:
    """tensors: those in VARYING."""
    features, assignment = tensors[0], tensors[2]
    arguments = {
        **dict(zip(VARYING, tensors, strict=True)),
        "order": regions.order,
        "real": regions.real,
        "positions": slots.positions,
        "real_slots": slots.real,
        "sample_stride": features.stride(0),
        "token_stride": features.stride(1),
        "regions": regions.count,
        "n": regions.size,
        "channels": features.shape[-1],
        "k": slots.size,
        "kept": slots.kept,
        "scale": float(scale),
        "REGRESSION": regression,
        "PLACES": block(regions.size),
        "SLOTS": block(slots.size),
    }
    # 8 warps for 64 tokens: 16 similarities per thread
    return Launch(_weights, (len(assignment),), arguments, warps=max(4, block(regions.size) // 8))


@triton.jit
def _weights(
    features,
    destinations,
    assignment,
    merging,
    unmerging,
    scratch,
    order,
    real,
    positions,
    real_slots,
    sample_stride,
    token_stride,
    regions,
    n,
    channels,
    k,
    kept,
    scale,
    REGRESSION: tl.constexpr,
    PLACES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    sample, region = group // regions, group % regions
    place, slot = tl.arange(0, PLACES), tl.arange(0, SLOTS)
    inside, taken = place < n, slot < k
    tokens, real_token = region * n + place, inside
    if order is not None:
        tokens = tl.load(order + tokens, mask=inside, other=0)
    if real is not None:
        real_token = tl.load(real + region * n + place, mask=inside, other=0) != 0
    merged, real_slot = region * k + slot, taken
    if positions is not None:  # a smaller region has fewer slots
        real_slot = tl.load(real_slots + merged, mask=taken, other=0) != 0
        merged = tl.load(positions + merged, mask=taken, other=0)
    chosen = tl.load(destinations + sample * kept + merged, mask=taken, other=0)
    rows = features + sample * sample_stride + tokens[:, None] * token_stride
    picked = features + sample * sample_stride + chosen[:, None] * token_stride
    in_rows, in_picked = inside[:, None], taken[:, None]

    squares, squares_picked = tl.zeros([PLACES], tl.float32), tl.zeros([SLOTS], tl.float32)
    for start in range(0, channels, SLICE):
        channel = start + tl.arange(0, SLICE)[None, :]
        x = tl.load(rows + channel, mask=in_rows & (channel < channels), other=0).to(tl.float32)
        d = tl.load(picked + channel, mask=in_picked & (channel < channels), other=0).to(tl.float32)
        squares += tl.sum(x * x, axis=1)
        squares_picked += tl.sum(d * d, axis=1)
    length = _at_least(tl.sqrt_rn(squares), 1e-12)[:, None]
    length_picked = _at_least(tl.sqrt_rn(squares_picked), 1e-12)[:, None]

    cosines = tl.zeros([SLOTS, PLACES], tl.float32)
    products = tl.zeros([PLACES, PLACES], tl.float32)  # of unit vectors less their mean
    for start in range(0, channels, SLICE):
        channel = start + tl.arange(0, SLICE)[None, :]
        x = tl.load(rows + channel, mask=in_rows & (channel < channels), other=0).to(tl.float32)
        d = tl.load(picked + channel, mask=in_picked & (channel < channels), other=0).to(tl.float32)
        x, d = x / length, d / length_picked
        # not in TF32, which is too coarse to tell similar tokens apart
        cosines = tl.dot(d, tl.trans(x), cosines, input_precision="ieee")
        if REGRESSION:
            # centred, since otherwise rounding errors would be as large as distances of similar tokens
            x = tl.where(in_rows, x - tl.sum(x, axis=0)[None, :] / n, 0.0)
            products = tl.dot(x, tl.trans(x), products, input_precision="ieee")

    logits = tl.where(real_slot[:, None], cosines * scale, float("-inf"))
    shares = tl.exp(logits - tl.max(logits, axis=0)[None, :])
    shares = shares / tl.sum(shares, axis=0)[None, :]
    shares = tl.where((shares <= 1e-12) | ~real_token[None, :], 0.0, shares)  # NaNs stay
    means = shares / _at_least(tl.sum(shares, axis=1), 1e-12)[:, None]
    at = (group * k + slot[:, None]) * n + place[None, :]
    there = taken[:, None] & inside[None, :]
    tl.store(assignment + at, shares, mask=there)
    tl.store(merging + at, means.to(merging.dtype.element_ty), mask=there)

    if REGRESSION:
        shares = _regression(means, products, scratch + group * (PLACES + 2 * SLOTS) * PLACES, real_slot, k)
    at = (group * n + place[None, :]) * k + slot[:, None]
    tl.store(unmerging + at, shares.to(unmerging.dtype.element_ty), mask=there)


@triton.jit
def _regression(means, products, scratch, real_slot, k):
    """core.regression_matrix, transposed: [k, n].

    means: [k, n], the merging matrix M. products: [n, n], P, scalar products of the centred tokens. Those of
    merged tokens with all tokens are M P, and those with each other M P M^T. A product of matrices that are
    read slice by slice needs few registers, so all three go to memory: `scratch`.
    """
    SLOTS: tl.constexpr = means.shape[0]
    PLACES: tl.constexpr = means.shape[1]
    slot, other, place = (
        tl.arange(0, SLOTS)[:, None],
        tl.arange(0, SLOTS)[None, :],
        tl.arange(0, PLACES)[None, :],
    )
    means_at = scratch + PLACES * PLACES
    across_at = means_at + SLOTS * PLACES
    tl.store(scratch + tl.arange(0, PLACES)[:, None] * PLACES + place, products)
    tl.store(means_at + slot * PLACES + place, means)
    tl.debug_barrier()
    across = tl.zeros([SLOTS, PLACES], tl.float32)
    for start in range(0, PLACES, SLICE):
        inner = start + tl.arange(0, SLICE)
        left = tl.load(means_at + slot * PLACES + inner[None, :])
        right = tl.load(scratch + inner[:, None] * PLACES + place)
        across = tl.dot(left, right, across, input_precision="ieee")
    tl.store(across_at + slot * PLACES + place, across)
    tl.debug_barrier()
    within = tl.zeros([SLOTS, SLOTS], tl.float32)
    for start in range(0, PLACES, SLICE):
        inner = start + tl.arange(0, SLICE)
        left = tl.load(across_at + slot * PLACES + inner[None, :])
        right = tl.load(means_at + other * PLACES + inner[:, None])
        within = tl.dot(left, right, within, input_precision="ieee")

    # squared distances |a|^2 + |b|^2 - 2 a b, of merged tokens from each other and from all tokens
    same = slot == other
    diagonal = tl.where(same, within, 0.0)
    squares, squares_too = tl.sum(diagonal, axis=1)[:, None], tl.sum(diagonal, axis=0)[None, :]
    squares_of_tokens = tl.load(scratch + place * PLACES + place)
    within = _at_least(squares + squares_too - 2 * within, 0.0)
    across = _at_least(squares + squares_of_tokens - 2 * across, 0.0)

    real = real_slot[:, None]
    pairs, count = real & real_slot[None, :], tl.sum(real_slot.to(tl.float32), axis=0)
    total = tl.sum(tl.sum(tl.where(pairs, within, 0.0), axis=1), axis=0)
    width = _at_least(total / (count * count), 1e-12)
    known = tl.where(pairs, tl.exp(within / (-2 * width)), 0.0)
    known += tl.where(same, tl.where(real, NOISE, 1.0), 0.0)
    wanted = tl.where(real, tl.exp(across / (-2 * width)), 0.0)

    # Gauss-Jordan elimination; `known` is symmetric and positive definite, so no pivot has to be sought
    for step in range(k):
        row = tl.sum(tl.where(slot == step, known, 0.0), axis=0)
        row_wanted = tl.sum(tl.where(slot == step, wanted, 0.0), axis=0)
        column = tl.sum(tl.where(other == step, known, 0.0), axis=1)
        at = tl.arange(0, SLOTS) == step
        pivot = tl.sum(tl.where(at, column, 0.0), axis=0)
        factor = (tl.where(at, pivot - 1, column) / pivot)[:, None]
        known -= factor * row[None, :]
        wanted -= factor * row_wanted[None, :]
    prior = tl.where(real, 1.0 / count, 0.0)
    return wanted + (1 - tl.sum(wanted, axis=0))[None, :] * prior


@triton.jit
def _at_least(x, least):
    """The maximum; NaNs stay, as in core, so that what is broken doesn't look right."""
    return tl.where(x < least, least, x)
