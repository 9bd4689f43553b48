"""The two Triton kernels of ``triton_splitkv``: attention over one split, and the merge of a request's splits.

Shapes: R requests; L_r query tokens of request r; Hkv KV heads with G query heads each; row ``t * G + g`` of a KV head is
query head ``h * G + g`` at token t, so a head's rows lie in row blocks of M. Keys come in tiles of BLOCK_N.

Partial results: ``parts`` holds [launched splits, Hkv, ROWS, DV] and, from ``lse_at`` on, [launched splits, Hkv, ROWS].

Numbers: fp32 accumulation, softmax in base 2 (logits are scaled by log2 e once), partial results are fp32 and already
normalised, with their base-2 log-sum-exp. A row that sees nothing gives 0 and -inf. Offsets into tensors are 64-bit.

Called by launch.py alone, which defines every argument. Must not: read anything that is not listed for a request, or
depend on a host value that a graph replay may change.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


# What varies from call to call without another kernel being better for it.
_VARYING = ["lse_at", "num_requests", "table_keys", "window", "target", "min_tiles", "max_splits", "stride_table"]


@triton.jit(do_not_specialize=_VARYING)
def split_kernel(
    q, k, v, out, lse, parts, lse_at,
    cu_q, lens, table, kv_start,
    draft_k, draft_v, draft_slots, mask, mask_indptr, positions, sinks, k_scale_ptr, v_scale_ptr,
    num_requests, table_keys, scale, k_scale, v_scale, softcap, window, target, min_tiles, max_splits,
    stride_qt, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_ot, stride_oh,
    stride_table, stride_dkt, stride_dkh, stride_dvt, stride_dvh, stride_mask,
    HKV: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    ROW_BLOCKS: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr, SPAN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, LATENT: tl.constexpr, DRAFT: tl.constexpr, MASK: tl.constexpr,
    MASK_INDPTR: tl.constexpr, MASK_STRIDE: tl.constexpr, WINDOW: tl.constexpr, POSITIONS: tl.constexpr,
    KV_START: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr, LSE: tl.constexpr, DEVICE_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (h * ROW_BLOCKS + b, i): row block b of KV head h over the i-th split of the batch.

    The splits of all requests are numbered through; which request split i belongs to, and which keys it covers, every
    program works out from the lengths (``_schedule``). A request's last split also does its draft tokens. The only
    split of a request writes the result, others write partial results for ``merge_kernel``.
    """
    h = tl.program_id(0) // ROW_BLOCKS
    row_block = tl.program_id(0) % ROW_BLOCKS
    i = tl.program_id(1)
    r, first, splits, total, mask_start = _schedule(
        i, cu_q, lens, kv_start, num_requests, table_keys, window, target, min_tiles, max_splits,
        BLOCK_R, BLOCK_N, PAGED, DRAFT, WINDOW, POSITIONS, KV_START, MASK == "full" and not MASK_INDPTR,
    )  # fmt: skip
    if i >= total:
        return
    q_first, length, listed, prefix = _lengths(cu_q, lens, r, table_keys, PAGED, DRAFT, r < num_requests)
    if row_block * M >= length * G:
        return

    rows = row_block * M + tl.arange(0, M)
    t = rows // G
    row_ok = t < length
    head = h * G + rows % G
    q_rows = q + (q_first + t).to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh
    d1 = tl.arange(0, D1)
    dv = tl.arange(0, BLOCK_DV)
    q1 = tl.load(q_rows + d1[None, :], mask=row_ok[:, None] & (d1 < SPAN)[None, :], other=0.0)
    if D2 > 0:
        d2 = SPAN + tl.arange(0, D2)
        q2 = tl.load(q_rows + d2[None, :], mask=row_ok[:, None] & (d2 < DK)[None, :], other=0.0)

    start = 0
    if KV_START:
        start = tl.load(kv_start + r).to(tl.int32)
    if WINDOW:
        at = start + prefix + t
        if POSITIONS:
            at = tl.load(positions + q_first + t, mask=row_ok, other=0).to(tl.int32)
    if DEVICE_SCALES:
        k_scale = k_scale * tl.load(k_scale_ptr).to(tl.float32)
        v_scale = v_scale * tl.load(v_scale_ptr).to(tl.float32)
    if PAGED:
        table_row = table + r.to(tl.int64) * stride_table
    else:
        table_row = table + tl.load(lens + r)

    # The split's tiles: an equal share of the request's, from the first one that a window leaves visible.
    low = 0
    if WINDOW:
        if POSITIONS:
            earliest = tl.min(tl.where(row_ok, at, 2147483647), 0) - window - start
        else:
            earliest = prefix - window
            low = tl.maximum(earliest, 0) // BLOCK_N
    tiles = tl.cdiv(prefix, BLOCK_N) - low
    share = tl.cdiv(tiles, splits)
    begin = low + (i - first) * share
    end = tl.minimum(begin + share, low + tiles)
    if WINDOW and POSITIONS:
        begin = tl.maximum(begin, tl.maximum(earliest, 0) // BLOCK_N)

    m_i = tl.full([M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([M], dtype=tl.float32)
    acc = tl.zeros([M, BLOCK_DV], dtype=tl.float32)
    n_offsets = tl.arange(0, BLOCK_N)
    for tile in range(begin, end):
        # Keys past the prefix repeat its last one, so that no load needs a mask; their logits become -inf.
        n = tile * BLOCK_N + n_offsets
        key = tl.minimum(n, prefix - 1)
        if PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(table_row + tile * BLOCK_N // PAGE_SIZE).to(tl.int64)
            k_rows = k + page * stride_kp + h * stride_kh + (key % PAGE_SIZE).to(tl.int64)[:, None] * stride_kt
            v_rows = v + page * stride_vp + h * stride_vh + (key % PAGE_SIZE).to(tl.int64)[:, None] * stride_vt
        else:
            pages = tl.load(table_row + key // PAGE_SIZE).to(tl.int64)
            k_rows = k + h * stride_kh + (pages * stride_kp + key % PAGE_SIZE * stride_kt)[:, None]
            v_rows = v + h * stride_vh + (pages * stride_vp + key % PAGE_SIZE * stride_vt)[:, None]
        k1 = _columns(k_rows, d1, SPAN, D1, q.dtype.element_ty)
        logits = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        if D2 > 0:
            k2 = _columns(k_rows, d2, DK, SPAN + D2, q.dtype.element_ty)
            logits = tl.dot(q2, tl.trans(k2), logits, input_precision=PRECISION)
        logits = _scaled(logits, scale * k_scale, softcap, SOFTCAP)
        visible = (n < prefix)[None, :]
        if WINDOW:
            visible = visible & (at[:, None] - (start + n)[None, :] <= window)
        logits = tl.where(visible, logits, float("-inf"))
        p, m_i, l_i, acc = _softmax(logits, m_i, l_i, acc, WINDOW)
        if LATENT:
            values = k1
        else:
            values = _columns(v_rows, dv, DV, BLOCK_DV, q.dtype.element_ty)
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)

    # The draft tokens, under the mask; only a request's last split has any.
    if DRAFT == "dense":
        acc = acc * v_scale
        draft_scale = scale
    else:
        draft_scale = scale * k_scale
    tail = tl.where(i - first == splits - 1, length, 0)
    for j0 in tl.range(0, tail, BLOCK_L, num_stages=1):
        j = j0 + tl.arange(0, BLOCK_L)
        exists = j < length
        if DRAFT == "cache":
            exists = exists & (prefix + j < listed)
        dk_rows, dv_rows = _draft_rows(
            k, v, draft_k, draft_v, draft_slots, table_row, q_first, prefix, j, exists, h,
            stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
            PAGE_SIZE, DRAFT,
        )  # fmt: skip
        e1 = tl.load(dk_rows + d1[None, :], mask=exists[:, None] & (d1 < SPAN)[None, :], other=0.0).to(q.dtype.element_ty)
        draft_logits = tl.dot(q1, tl.trans(e1), input_precision=PRECISION)
        if D2 > 0:
            e2 = tl.load(dk_rows + d2[None, :], mask=exists[:, None] & (d2 < DK)[None, :], other=0.0).to(q.dtype.element_ty)
            draft_logits = tl.dot(q2, tl.trans(e2), draft_logits, input_precision=PRECISION)
        draft_logits = _scaled(draft_logits, draft_scale, softcap, SOFTCAP)
        sees = row_ok[:, None] & exists[None, :]
        sees = sees & _allowed(mask, mask_indptr, mask_start, r, q_first, length, start + prefix, t, j, sees, stride_mask, MASK, MASK_INDPTR, MASK_STRIDE)
        if WINDOW:
            if POSITIONS:
                at_j = tl.load(positions + q_first + j, mask=exists, other=0).to(tl.int32)
            else:
                at_j = start + prefix + j
            sees = sees & (at[:, None] - at_j[None, :] <= window)
        draft_logits = tl.where(sees, draft_logits, float("-inf"))
        pd, m_i, l_i, acc = _softmax(draft_logits, m_i, l_i, acc, True)
        if LATENT:
            draft_values = e1
        else:
            draft_values = tl.load(dv_rows + dv[None, :], mask=exists[:, None] & (dv < DV)[None, :], other=0.0).to(q.dtype.element_ty)
        acc = tl.dot(pd.to(draft_values.dtype), draft_values, acc, input_precision=PRECISION)
    if DRAFT != "dense":
        acc = acc * v_scale

    column_ok = row_ok[:, None] & (dv < DV)[None, :]
    if splits == 1:
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2E
            m_new = tl.maximum(m_i, sink)
            alpha = tl.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.exp2(sink - m_new)
            acc = acc * alpha[:, None]
            m_i = m_new
        result = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
        o_rows = out + (q_first + t).to(tl.int64)[:, None] * stride_ot + head[:, None] * stride_oh
        tl.store(o_rows + dv[None, :], result.to(out.dtype.element_ty), mask=column_ok)
        if LSE:
            tl.store(lse + (q_first + t).to(tl.int64) * (HKV * G) + head, (m_i + tl.log2(l_i)) * LN2, mask=row_ok)
    else:
        part = (i.to(tl.int64) * HKV + h) * ROWS + rows
        result = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
        tl.store(parts + part[:, None] * DV + dv[None, :], result, mask=column_ok)
        tl.store(parts + lse_at + part, m_i + tl.log2(l_i), mask=row_ok)


@triton.jit(do_not_specialize=_VARYING[:-1])
def merge_kernel(
    out, lse, parts, lse_at, cu_q, lens, kv_start, sinks,
    num_requests, table_keys, window, target, min_tiles, max_splits, stride_ot, stride_oh,
    HKV: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr, PAGED: tl.constexpr, DRAFT: tl.constexpr, WINDOW: tl.constexpr,
    POSITIONS: tl.constexpr, KV_START: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Program (h * ROWS + row, r): the partial results of one row, weighted by their share of the softmax mass, in split order."""
    h = tl.program_id(0) // ROWS
    row = tl.program_id(0) % ROWS
    r = tl.program_id(1)
    first, splits = _splits_of(
        r, cu_q, lens, kv_start, num_requests, table_keys, window, target, min_tiles, max_splits,
        BLOCK_R, BLOCK_N, PAGED, DRAFT, WINDOW, POSITIONS,
    )  # fmt: skip
    if splits <= 1:
        return
    q_first, length, listed, prefix = _lengths(cu_q, lens, r, table_keys, PAGED, DRAFT, r < num_requests)
    t = row // G
    head = h * G + row % G
    if t >= length:
        return

    dv = tl.arange(0, BLOCK_DV)
    m_i = float("-inf")
    l_i = 0.0
    if SINKS:
        m_i = tl.load(sinks + head).to(tl.float32) * LOG2E
        l_i = 1.0
    acc = tl.zeros([BLOCK_DV], dtype=tl.float32)
    for s0 in range(0, splits, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        part = ((first + s).to(tl.int64) * HKV + h) * ROWS + row
        part_m = tl.load(parts + lse_at + part, mask=s < splits, other=float("-inf"))
        values = tl.load(parts + part[:, None] * DV + dv[None, :], mask=(s < splits)[:, None] & (dv < DV)[None, :], other=0.0)
        m_new = tl.maximum(m_i, tl.max(part_m, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - base)
        weight = tl.exp2(part_m - base)
        l_i = l_i * alpha + tl.sum(weight, 0)
        acc = acc * alpha + tl.sum(values * weight[:, None], 0)
        m_i = m_new
    result = acc / tl.where(l_i > 0, l_i, 1.0)
    o_row = out + (q_first + t).to(tl.int64) * stride_ot + head * stride_oh
    tl.store(o_row + dv, result.to(out.dtype.element_ty), mask=dv < DV)
    if LSE:
        tl.store(lse + (q_first + t).to(tl.int64) * (HKV * G) + head, (m_i + tl.log2(l_i)) * LN2)


@triton.jit
def _lengths(cu_q, lens, r, table_keys, PAGED: tl.constexpr, DRAFT: tl.constexpr, inside):
    """(first row of q, query tokens, listed keys, keys of the prefix) of request(s) r."""
    q_first = tl.load(cu_q + r, mask=inside, other=0).to(tl.int32)
    length = tl.load(cu_q + r + 1, mask=inside, other=0).to(tl.int32) - q_first
    if PAGED:
        listed = tl.minimum(tl.load(lens + r, mask=inside, other=0), table_keys).to(tl.int32)
    else:
        listed = (tl.load(lens + r + 1, mask=inside, other=0) - tl.load(lens + r, mask=inside, other=0)).to(tl.int32)
    prefix = listed
    if DRAFT == "cache":
        prefix = tl.maximum(listed - length, 0)
    return q_first, length, listed, tl.maximum(prefix, 0)


@triton.jit
def _splits(length, prefix, window, target, min_tiles, max_splits, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, SKIP: tl.constexpr):
    """Splits of each request: int32 [BLOCK_R]. Their sum is at most target + num_requests.

    Each takes about total / target tiles. Up to half as many again where that makes all splits fit in ``target``
    programs, which then run at once: a few more tiles a program cost less than a second round of programs.
    """
    tiles = tl.cdiv(prefix, BLOCK_N)
    if SKIP:  # tiles that a window hides from every query token
        tiles = tiles - tl.maximum(prefix - window, 0) // BLOCK_N
    tiles = tl.where(length > 0, tiles, 0)
    chunk = tl.maximum(tl.cdiv(tl.sum(tiles, 0), target), min_tiles)
    if BLOCK_R > 1:
        tries = chunk + (chunk * tl.arange(0, 8) + 15) // 16
        used = tl.sum(tl.cdiv(tiles[:, None], tries[None, :]) + tl.where((length > 0) & (tiles == 0), 1, 0)[:, None], 0)
        fits = tl.min(tl.where(used <= target, tries, 2147483647), 0)
        chunk = tl.where(fits < 2147483647, fits, chunk)
    splits = tl.minimum(tl.maximum(tl.cdiv(tiles, chunk), 1), max_splits)
    return tl.where(length > 0, splits, 0)


@triton.jit
def _splits_of(
    r, cu_q, lens, kv_start, num_requests, table_keys, window, target, min_tiles, max_splits,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, DRAFT: tl.constexpr, WINDOW: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """(number of its first split, number of splits) of request r."""
    index = tl.arange(0, BLOCK_R)
    _, length, _, prefix = _lengths(cu_q, lens, index, table_keys, PAGED, DRAFT, index < num_requests)
    splits = _splits(length, prefix, window, target, min_tiles, max_splits, BLOCK_R, BLOCK_N, WINDOW and not POSITIONS)
    return tl.sum(tl.where(index < r, splits, 0), 0), tl.sum(tl.where(index == r, splits, 0), 0)


@triton.jit
def _schedule(
    i, cu_q, lens, kv_start, num_requests, table_keys, window, target, min_tiles, max_splits,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, DRAFT: tl.constexpr, WINDOW: tl.constexpr, POSITIONS: tl.constexpr,
    KV_START: tl.constexpr, MASK_STARTS: tl.constexpr,
):  # fmt: skip
    """(request, its first split, its splits, splits of all requests, its first entry of a full mask) of split i."""
    index = tl.arange(0, BLOCK_R)
    inside = index < num_requests
    _, length, _, prefix = _lengths(cu_q, lens, index, table_keys, PAGED, DRAFT, inside)
    splits = _splits(length, prefix, window, target, min_tiles, max_splits, BLOCK_R, BLOCK_N, WINDOW and not POSITIONS)
    ends = tl.cumsum(splits, 0)
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
def _columns(rows, d, END: tl.constexpr, BLOCK_END: tl.constexpr, dtype: tl.constexpr):
    """Columns d of the rows at ``rows`` [n, 1] as ``dtype``; those from END on are 0, unmasked where END is the block's end."""
    if END == BLOCK_END:
        return tl.load(rows + d[None, :]).to(dtype)
    return tl.load(rows + d[None, :], mask=(d < END)[None, :], other=0.0).to(dtype)


@triton.jit
def _scaled(logits, scale, softcap, SOFTCAP: tl.constexpr):
    """Base-2 logits: scaled, soft-capped (tanh by exp2, which saturates without overflow), times log2 e."""
    if SOFTCAP:
        doubled = tl.exp2(logits * (2.0 * LOG2E * scale / softcap))
        return (softcap * LOG2E) * (1.0 - 2.0 / (doubled + 1.0))
    return logits * (scale * LOG2E)


@triton.jit
def _softmax(logits, m_i, l_i, acc, MAY_BE_EMPTY: tl.constexpr):
    """One step of the online softmax: (weights, maximum, denominator, rescaled accumulator)."""
    m_new = tl.maximum(m_i, tl.max(logits, 1))
    base = m_new
    if MAY_BE_EMPTY:
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m_i - base)
    p = tl.exp2(logits - base[:, None])
    return p, m_new, l_i * alpha + tl.sum(p, 1), acc * alpha[:, None]


@triton.jit
def _draft_rows(
    k, v, draft_k, draft_v, draft_slots, table_row, q_first, prefix, j, exists, h,
    stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    PAGE_SIZE: tl.constexpr, DRAFT: tl.constexpr,
):  # fmt: skip
    """Where draft tokens j have K and V: pointers [BLOCK_L, 1]."""
    if DRAFT == "dense":
        token = (q_first + j).to(tl.int64)
        return draft_k + token[:, None] * stride_dkt + h * stride_dkh, draft_v + token[:, None] * stride_dvt + h * stride_dvh
    if DRAFT == "slots":
        slot = tl.load(draft_slots + q_first + j, mask=exists, other=0).to(tl.int64)
        page = slot // PAGE_SIZE
        row = slot % PAGE_SIZE
    else:
        page = tl.load(table_row + (prefix + j) // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        row = (prefix + j) % PAGE_SIZE
    k_rows = k + h * stride_kh + (page * stride_kp + row * stride_kt)[:, None]
    v_rows = v + h * stride_vh + (page * stride_vp + row * stride_vt)[:, None]
    return k_rows, v_rows


@triton.jit
def _allowed(
    mask, mask_indptr, mask_start, r, q_first, length, before, t, j, where,
    stride_mask, MASK: tl.constexpr, MASK_INDPTR: tl.constexpr, MASK_STRIDE: tl.constexpr,
):  # fmt: skip
    """Which draft tokens j each row's token t sees by the mask: [M, BLOCK_L], meaningful where ``where`` holds."""
    if MASK == "none":
        return j[None, :] <= t[:, None]
    if MASK == "packed":
        words = mask + (q_first + t).to(tl.int64)[:, None] * stride_mask + (j // 64)[None, :]
        return ((tl.load(words, mask=where, other=0) >> (j % 64).to(tl.int64)[None, :]) & 1) != 0
    if MASK_INDPTR:
        mask_start = tl.load(mask_indptr + r).to(tl.int64)
    if MASK == "full":
        row_start = t.to(tl.int64) * (before + length) + before
    elif MASK_INDPTR:
        row_start = t.to(tl.int64) * length
    else:
        mask_start = r.to(tl.int64) * MASK_STRIDE * MASK_STRIDE
        row_start = t.to(tl.int64) * MASK_STRIDE
    return tl.load(mask + mask_start + row_start[:, None] + j[None, :], mask=where, other=0) != 0
