"""Choose destinations in one launch: one program per region, which keeps all similarities on chip."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tomadiff.core import Regions, Slots
from tomadiff.core import select as twin

from . import LARGEST, block
from .launch import Launch, repeats_of, run

CHOSEN = tl.constexpr(twin.CHOSEN)
TIE = tl.constexpr(twin.TIE)


def facility_location(similarity: Tensor, k: int, real: Tensor | None = None) -> Tensor:
    """The same as core.facility_location: [G, n, n] -> [G, k]."""
    if similarity.shape[-1] > LARGEST:
        return twin.facility_location(similarity, k, real)
    picks = torch.empty(len(similarity), k, dtype=torch.long, device=similarity.device)
    facility_location_launch(similarity.contiguous(), real, picks).run()
    return picks


def destinations(features: Tensor, regions: Regions, slots: Slots) -> Tensor:
    """The destinations, [B, K] token numbers, for features in image order, [B, N, C], in one launch.

    It replaces core's regions.arrange, similarity, facility_location, regions.tokens_at and slots.pack.
    """
    check_features(features, regions)
    features = features if features.stride(-1) == 1 else features.contiguous()
    chosen = torch.empty(len(features), slots.kept, dtype=torch.long, device=features.device)
    run(
        repeats_of(regions, slots),
        "destinations",
        ("features", "chosen"),
        (features,),
        (chosen,),
        lambda: destinations_launch(features, regions, slots, chosen),
    )
    return chosen


def check_features(features: Tensor, regions: Regions) -> None:
    """Refuse features of another image: a kernel would read beyond them."""
    if features.shape[1] != regions.tokens:
        raise ValueError(f"features {list(features.shape)}: the regions are of {regions.tokens} tokens")


def facility_location_launch(similarity: Tensor, real: Tensor | None, picks: Tensor) -> Launch:
    (groups, k), n = picks.shape, similarity.shape[-1]
    arguments = {"similarity": similarity, "real": real, "picks": picks, "n": n, "k": k, "PLACES": block(n)}
    return Launch(_facility_location, (groups,), arguments, _warps(n))


def destinations_launch(features: Tensor, regions: Regions, slots: Slots, chosen: Tensor) -> Launch:
    if regions.size > LARGEST:
        raise ValueError(f"regions of {regions.size} tokens: a program holds up to {LARGEST}")
    arguments = {
        "features": features,
        "order": regions.order,
        "real": regions.real,
        "positions": slots.positions,
        "real_slots": slots.real,
        "chosen": chosen,
        "sample_stride": features.stride(0),
        "token_stride": features.stride(1),
        "regions": regions.count,
        "n": regions.size,
        "channels": features.shape[-1],
        "k": slots.size,
        "kept": slots.kept,
        "PLACES": block(regions.size),
        "CHANNELS": 16,  # channels per iteration; more would not fit in registers
    }
    return Launch(_destinations, (len(features) * regions.count,), arguments, _warps(regions.size))


def _warps(n: int) -> int:
    """For 256 tokens, the maximum of 32 warps; for 64 tokens, 8 warps: 16 similarities per thread."""
    return block(n) // 8


@triton.jit
def _facility_location(similarity, real, picks, n, k, PLACES: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PLACES)
    free = places < n
    both = free[:, None] & free[None, :]
    at = (group * n + places[:, None]) * n + places[None, :]
    short = tl.load(similarity + at, mask=both, other=1) - 1
    if real is not None:
        free = tl.load(real + group * n + places, mask=free, other=0) != 0
        short = tl.where(free[None, :], short, 0.0)  # covering padding gains nothing
    nearest = tl.full([PLACES], float("-inf"), tl.float32)
    for slot in range(k):
        pick, nearest, free = _pick(short, nearest, free, places, n)
        tl.store(picks + group * k + slot, pick)


@triton.jit
def _destinations(
    features,
    order,
    real,
    positions,
    real_slots,
    chosen,
    sample_stride,
    token_stride,
    regions,
    n,
    channels,
    k,
    kept,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64) // regions
    region = tl.program_id(0) % regions
    places = tl.arange(0, PLACES)
    inside = places < n
    tokens = region * n + places
    free = inside
    if order is not None:
        tokens = tl.load(order + tokens, mask=inside, other=0)
    if real is not None:
        free = tl.load(real + region * n + places, mask=inside, other=0) != 0
    rows = features + sample * sample_stride + tokens[:, None].to(tl.int64) * token_stride

    products = tl.zeros([PLACES, PLACES], tl.float32)
    for start in range(0, channels, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)[None, :]
        x = tl.load(rows + channel, mask=inside[:, None] & (channel < channels), other=0).to(tl.float32)
        # not in TF32, which is too coarse to tell similar tokens apart
        products = tl.dot(x, tl.trans(x), products, input_precision="ieee")
    # the squared norms are on the diagonal; the norms are needed along both axes
    diagonal = tl.where(places[:, None] == places[None, :], products, 0.0)
    lengths = tl.maximum(tl.sqrt_rn(tl.sum(diagonal, axis=1)), 1e-12)
    lengths_too = tl.maximum(tl.sqrt_rn(tl.sum(diagonal, axis=0)), 1e-12)
    short = products / (lengths[:, None] * lengths_too[None, :]) - 1
    short = tl.where(free[None, :], short, 0.0)  # covering padding gains nothing

    nearest = tl.full([PLACES], float("-inf"), tl.float32)
    for slot in range(k):
        pick, nearest, free = _pick(short, nearest, free, places, n)
        token = (region * n + pick).to(tl.int64)
        if order is not None:
            token = tl.load(order + token)
        at = region * k + slot
        if positions is None:
            tl.store(chosen + sample * kept + at, token)
        else:  # a smaller region has fewer slots
            wanted = tl.load(real_slots + at) != 0
            tl.store(chosen + sample * kept + tl.load(positions + at), token, mask=wanted)


@triton.jit
def _pick(short, nearest, free, places, n):
    """Return the next pick, each token's similarity to its nearest pick less 1, and the tokens still free.

    short: [n, n] similarity less 1, which keeps the summands small near cosine 1. core stores the maximum of
    `short` and `nearest`; here it is recomputed, which is as exact and leaves `short` unchanged.
    """
    value = tl.sum(tl.maximum(short, nearest[None, :]), axis=1) - places * TIE
    pick = tl.argmax(tl.where(free, value, CHOSEN), axis=0)
    row = tl.sum(tl.where(places[:, None] == pick, short, 0.0), axis=0)
    # with NaNs, argmax may return an index beyond the region, which must not be read
    return tl.minimum(pick, n - 1), tl.maximum(nearest, row), free & (places != pick)
