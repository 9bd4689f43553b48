"""What both split kernels and the merge share, as functions on the device: the schedule, and what triton_shared has.

They create no tensors of their own but get index vectors from the kernel, which may be written in Triton or in Gluon:
Gluon's carry a layout.
"""

import triton
import triton.language as tl

from flashmap.core.implementations.triton_shared import scratch
from flashmap.core.implementations.triton_shared.device import (
    allowed,
    columns,
    draft_rows,
    draft_tokens,
    finish,
    lengths,
    pairs,
    scaled,
    softmax,
)

try:
    from triton.experimental.gluon.language import convert_layout
except ImportError:  # a Triton without Gluon: no kernel that needs it is launched then
    convert_layout = None

__all__ = [
    "COUNTERS",
    "VARYING",
    "allowed",
    "columns",
    "draft_rows",
    "draft_tokens",
    "finish",
    "lengths",
    "pairs",
    "power_of_two",
    "scaled",
    "schedule",
    "softmax",
    "splits_of",
]
COUNTERS = tl.constexpr(scratch.COUNTERS)
# Arguments of the kernels that vary from call to call without another compilation being better for it.
VARYING = ["lse_at", "num_requests", "table_keys", "window", "target", "min_tiles", "max_splits", "stride_table"]


@triton.jit
def split_counts(
    eighths, length, prefix, window, target, min_tiles, max_splits,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Splits of each request: int32 [BLOCK_R]. Their sum is at most target + num_requests.

    Each takes about total / target tiles, and min_tiles where there are tiles enough to keep 32 programs busy. Up to half as many again where that makes all splits fit in ``target``
    programs, which then run at once: a few more tiles a program cost less than a second round of programs.
    """
    tiles = tl.cdiv(prefix, BLOCK_N)
    if SKIP:  # tiles that a window hides from every query token
        tiles = tiles - tl.maximum(prefix - window, 0) // BLOCK_N
    tiles = tl.where(length > 0, tiles, 0)
    total = tl.sum(tiles, 0)
    chunk = tl.maximum(tl.maximum(tl.cdiv(total, target), tl.minimum(min_tiles, tl.cdiv(total, 32))), 1)
    if BLOCK_R > 1:
        tries = chunk + (chunk * eighths + 15) // 16
        used = tl.sum(tl.cdiv(tiles[:, None], tries[None, :]) + tl.where((length > 0) & (tiles == 0), 1, 0)[:, None], 0)
        fits = tl.min(tl.where(used <= target, tries, 2147483647), 0)
        chunk = tl.where(fits < 2147483647, fits, chunk)
    splits = tl.minimum(tl.maximum(tl.cdiv(tiles, chunk), 1), max_splits)
    return tl.where(length > 0, splits, 0)


@triton.jit
def splits_of(
    r, index, eighths, cu_q, lens, kv_start, num_requests, table_keys, window, target, min_tiles, max_splits,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, DRAFT: tl.constexpr, WINDOW: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """(number of its first split, number of splits) of request r."""
    _, length, _, prefix = lengths(cu_q, lens, index, table_keys, PAGED, DRAFT, index < num_requests)
    splits = split_counts(eighths, length, prefix, window, target, min_tiles, max_splits, BLOCK_R, BLOCK_N, WINDOW and not POSITIONS)
    return tl.sum(tl.where(index < r, splits, 0), 0), tl.sum(tl.where(index == r, splits, 0), 0)


@triton.jit
def schedule(
    i, index, eighths, cu_q, lens, kv_start, num_requests, table_keys, window, target, min_tiles, max_splits,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, DRAFT: tl.constexpr, WINDOW: tl.constexpr, POSITIONS: tl.constexpr,
    KV_START: tl.constexpr, MASK_STARTS: tl.constexpr, SCAN_LAYOUT: tl.constexpr,
):  # fmt: skip
    """(request, its first split, its splits, splits of all requests, its first entry of a full mask) of split i."""
    inside = index < num_requests
    _, length, _, prefix = lengths(cu_q, lens, index, table_keys, PAGED, DRAFT, inside)
    splits = split_counts(eighths, length, prefix, window, target, min_tiles, max_splits, BLOCK_R, BLOCK_N, WINDOW and not POSITIONS)
    if SCAN_LAYOUT is None:
        ends = tl.cumsum(splits, 0)
    else:  # Gluon scans no slice layout
        ends = tl.cumsum(convert_layout(splits, SCAN_LAYOUT), 0)
    total = tl.max(ends, 0)
    r = tl.minimum(tl.sum((ends <= i).to(tl.int32), 0), num_requests - 1)
    mine = tl.sum(tl.where(index == r, splits, 0), 0)
    first = tl.sum(tl.where(index < r, splits, 0), 0)
    mask_start = r.to(tl.int64) * 0
    if MASK_STARTS:
        width = prefix + length
        if KV_START:
            width = width + tl.load(kv_start + index, mask=inside, other=0).to(tl.int32)
        mask_start = tl.sum(tl.where(index < r, length.to(tl.int64) * width.to(tl.int64), 0), 0)
    return r, first, mine, total, mask_start


@triton.jit
def power_of_two(x):
    """The largest power of two up to each x >= 0 (fp32); 1 where there is none. Dividing by it changes no mantissa."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(power > 0, power, 1.0)
