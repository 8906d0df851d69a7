"""Merge and unmerge in one launch each, reading and writing tokens in image order.

Both use the same kernel: gather rows, multiply them by their region's matrix, and scatter the result.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tomadiff.core import Plan

from . import block
from .launch import Launch, Repeats, run

# larger blocks run out of registers without tensor cores, that is, in fp32 without TF32 and on Volta
ROWS, CHANNELS = 32, 64


def merge(plan: Plan, x: Tensor, repeats: Repeats | None = None) -> Tensor:
    """The same as plan.merge(x): [B, N, C] -> [B, K, C]."""
    x = _readable(x)
    merged = x.new_empty(len(x), plan.slots.kept, x.shape[-1])
    varying, inputs = ("weights", "x", "out"), (plan.merging, x)
    run(repeats, "merge", varying, inputs, (merged,), lambda: merge_launch(plan, x, merged))
    return merged


def unmerge(
    plan: Plan,
    y: Tensor,
    onto: Tensor | None = None,
    merged: Tensor | None = None,
    repeats: Repeats | None = None,
) -> Tensor:
    """The same as plan.unmerge(y, onto, merged): [B, K, C] -> [B, N, C]."""
    y, onto, merged = _readable(y), _readable(onto), _readable(merged)
    x = y.new_empty(len(y), plan.regions.tokens, y.shape[-1])
    varying, inputs = ("weights", "x", "less", "onto", "out"), (plan.unmerging, y, merged, onto)
    run(repeats, "unmerge", varying, inputs, (x,), lambda: unmerge_launch(plan, y, onto, merged, x))
    return x


def merge_launch(plan: Plan, x: Tensor, merged: Tensor) -> Launch:
    regions, slots = plan.regions, plan.slots
    return _launch(plan.merging, x, None, regions.order, None, merged, slots.positions, slots.real)


def unmerge_launch(plan: Plan, y: Tensor, onto: Tensor | None, merged: Tensor | None, x: Tensor) -> Launch:
    regions, slots = plan.regions, plan.slots
    return _launch(plan.unmerging, y, merged, slots.positions, onto, x, regions.order, regions.real)


def _launch(
    weights: Tensor,
    x: Tensor,
    less: Tensor | None,
    x_rows: Tensor | None,
    onto: Tensor | None,
    out: Tensor,
    out_rows: Tensor | None,
    out_real: Tensor | None,
) -> Launch:
    """out[out_rows] = onto[out_rows] + weights @ (x - less)[x_rows] in each region, where out_real is set."""
    groups, outer, inner = weights.shape
    samples, _, channels = x.shape
    blocks = {
        "OUTER": min(block(outer), ROWS),
        "INNER": min(block(inner), ROWS),
        "CHANNELS": min(block(channels), CHANNELS),
    }
    arguments = {
        "weights": weights,
        "x": x,
        "less": less,
        "x_rows": x_rows,
        "onto": onto,
        "out": out,
        "out_rows": out_rows,
        "out_real": out_real,
        **_strides("weights", weights, "group", "row", "column"),
        **_strides("x", x, "sample", "row"),
        **_strides("less", less, "sample", "row"),
        **_strides("onto", onto, "sample", "row"),
        **_strides("out", out, "sample", "row"),
        "regions": groups // samples,
        "outer": outer,
        "inner": inner,
        "channels": channels,
        # Triton's interpreter multiplies bf16 bit patterns as if they were integers
        "UPCAST": not isinstance(_mix, triton.JITFunction),
        **blocks,
    }
    grid = (groups, triton.cdiv(outer, blocks["OUTER"]), triton.cdiv(channels, blocks["CHANNELS"]))
    return Launch(_mix, grid, arguments, warps=4)


def _strides(name: str, x: Tensor | None, *axes: str) -> dict[str, int]:
    return {f"{name}_{axis}": 0 if x is None else x.stride(i) for i, axis in enumerate(axes)}


def _readable(x: Any) -> Any:
    """The tensor as the kernel can read it: any strides will do, as long as channels are contiguous."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _mix(
    weights,
    x,
    less,
    x_rows,
    onto,
    out,
    out_rows,
    out_real,
    weights_group,
    weights_row,
    weights_column,
    x_sample,
    x_row,
    less_sample,
    less_row,
    onto_sample,
    onto_row,
    out_sample,
    out_row,
    regions,
    outer,
    inner,
    channels,
    UPCAST: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    sample, region = group // regions, group % regions
    row = tl.program_id(1) * OUTER + tl.arange(0, OUTER)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    in_row, in_channel = row < outer, channel < channels

    total = tl.zeros([OUTER, CHANNELS], tl.float32)
    for start in range(0, inner, INNER):
        source = start + tl.arange(0, INNER)
        in_source = source < inner
        place = region * inner + source
        if x_rows is not None:
            place = tl.load(x_rows + place, mask=in_source, other=0)
        at = place[:, None] * x_row + channel[None, :]
        there = in_source[:, None] & in_channel[None, :]
        values = tl.load(x + sample * x_sample + at, mask=there, other=0)
        if less is not None:
            at = place[:, None] * less_row + channel[None, :]
            before = tl.load(less + sample * less_sample + at, mask=there, other=0)
            values = (values.to(tl.float32) - before.to(tl.float32)).to(values.dtype)
        at = row[:, None] * weights_row + source[None, :] * weights_column
        there = in_row[:, None] & in_source[None, :]
        shares = tl.load(weights + group * weights_group + at, mask=there, other=0).to(values.dtype)
        if UPCAST:
            values, shares = values.to(tl.float32), shares.to(tl.float32)
        total = tl.dot(shares, values, total, input_precision="ieee")

    place = region * outer + row
    if out_real is not None:
        in_row = tl.load(out_real + place, mask=in_row, other=0) != 0
    if out_rows is not None:
        place = tl.load(out_rows + place, mask=in_row, other=0)
    there = in_row[:, None] & in_channel[None, :]
    if onto is not None:
        at = place[:, None] * onto_row + channel[None, :]
        total += tl.load(onto + sample * onto_sample + at, mask=there, other=0).to(tl.float32)
    at = place[:, None] * out_row + channel[None, :]
    tl.store(out + sample * out_sample + at, total.to(out.dtype.element_ty), mask=there)
