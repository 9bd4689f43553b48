"""The two Triton kernels of ``triton_splitkv``: attention over one split, and the merge of a request's splits.

Shapes: R requests; L_r query tokens of request r; Hkv KV heads with G query heads each; row ``t * G + g`` of a KV head is
query head ``h * G + g`` at token t, so a head's rows lie in row blocks of M. Keys come in tiles of BLOCK_N.

Partial results: ``parts`` holds [launched splits, Hkv, ROWS, DV] and, from ``lse_at`` on, [launched splits, Hkv, ROWS]. Before it lie
COUNTERS int32, which are 0 between launches: with LAST_MERGES, the arrivals of a request's splits, and no merge kernel runs.

Numbers: fp32 accumulation, softmax in base 2 (logits are scaled by log2 e once), partial results are fp32 and already
normalised, with their base-2 log-sum-exp. A row that sees nothing gives 0 and -inf. Offsets into tensors are 64-bit.

Called by launch.py alone, which defines every argument. Must not: read anything that is not listed for a request, or
depend on a host value that a graph replay may change.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmap.core.implementations.triton_splitkv import device
from flashmap.core.implementations.triton_splitkv.device import COUNTERS, VARYING


@triton.jit(do_not_specialize=VARYING)
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
    KV_START: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr, LSE: tl.constexpr,
    K_SCALE_ON_DEVICE: tl.constexpr, V_SCALE_ON_DEVICE: tl.constexpr, PAIRS: tl.constexpr, LAST_MERGES: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (h * ROW_BLOCKS + b, i): row block b of KV head h over the i-th split of the batch.

    The splits of all requests are numbered through; which request split i belongs to, and which keys it covers, every
    program works out from the lengths (``schedule``). A request's last split also does its draft tokens. The only
    split of a request writes the result, others write partial results for ``merge_kernel``, or the last to arrive merges.
    """
    h = tl.program_id(0) // ROW_BLOCKS
    row_block = tl.program_id(0) % ROW_BLOCKS
    i = tl.program_id(1)
    r, first, splits, total, mask_start = device.schedule(
        i, tl.arange(0, BLOCK_R), tl.arange(0, 8), cu_q, lens, kv_start, num_requests, table_keys, window, target, min_tiles, max_splits,
        BLOCK_R, BLOCK_N, PAGED, DRAFT, WINDOW, POSITIONS, KV_START, MASK == "full" and not MASK_INDPTR, None,
    )  # fmt: skip
    if i >= total:
        return
    q_first, length, listed, prefix = device.lengths(cu_q, lens, r, table_keys, PAGED, DRAFT, r < num_requests)
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
    q2, d2 = q1, d1  # not read unless D2 > 0
    if D2 > 0:
        d2 = SPAN + tl.arange(0, D2)
        q2 = tl.load(q_rows + d2[None, :], mask=row_ok[:, None] & (d2 < DK)[None, :], other=0.0)
    # An fp8 prefix is multiplied in fp16, which it becomes in one step: a query row in bf16 is divided by a power of two to fit.
    unit = 1.0
    if PAIRS:
        if q.dtype.element_ty == tl.bfloat16:
            largest = tl.max(tl.abs(q1.to(tl.float32)), 1)
            if D2 > 0:
                largest = tl.maximum(largest, tl.max(tl.abs(q2.to(tl.float32)), 1))
            unit = device.power_of_two(largest)[:, None]
        p1, p1_odd = tl.split(tl.reshape((q1.to(tl.float32) / unit).to(tl.float16), [M, D1 // 2, 2]))
        w1 = tl.arange(0, D1 // 2)
        if D2 > 0:
            p2, p2_odd = tl.split(tl.reshape((q2.to(tl.float32) / unit).to(tl.float16), [M, D2 // 2, 2]))
            w2 = SPAN // 2 + tl.arange(0, D2 // 2)
    else:
        p1 = q1
        if D2 > 0:
            p2 = q2

    start = 0
    if KV_START:
        start = tl.load(kv_start + r).to(tl.int32)
    at = t  # not read unless WINDOW
    if WINDOW:
        at = start + prefix + t
        if POSITIONS:
            at = tl.load(positions + q_first + t, mask=row_ok, other=0).to(tl.int32)
    if K_SCALE_ON_DEVICE:
        k_scale = k_scale * tl.load(k_scale_ptr).to(tl.float32)
    if V_SCALE_ON_DEVICE:
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
    if PAIRS:
        acc = tl.zeros([M, BLOCK_DV // 2], dtype=tl.float32)
        acc_odd = tl.zeros([M, BLOCK_DV // 2], dtype=tl.float32)
        wv = tl.arange(0, BLOCK_DV // 2)
    else:
        acc = tl.zeros([M, BLOCK_DV], dtype=tl.float32)
    n_offsets = tl.arange(0, BLOCK_N)
    k_head = k + h.to(tl.int64) * stride_kh
    v_head = v + h.to(tl.int64) * stride_vh
    for tile in range(begin, end):
        # Keys past the prefix repeat its last one, so that no load needs a mask; their logits become -inf.
        n = tile * BLOCK_N + n_offsets
        key = tl.minimum(n, prefix - 1)
        if PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(table_row + tile * BLOCK_N // PAGE_SIZE).to(tl.int64)
            row = key % PAGE_SIZE
            k_rows = k_head + page * stride_kp + (row * stride_kt)[:, None]
            v_rows = v_head + page * stride_vp + (row * stride_vt)[:, None]
        else:
            pages = tl.load(table_row + key // PAGE_SIZE).to(tl.int64)
            k_rows = k_head + (pages * stride_kp + key % PAGE_SIZE * stride_kt)[:, None]
            v_rows = v_head + (pages * stride_vp + key % PAGE_SIZE * stride_vt)[:, None]
        if PAIRS:
            k1, k1_odd = device.pairs(k_rows, w1, SPAN, D1)
            logits = tl.dot(p1_odd, tl.trans(k1_odd), tl.dot(p1, tl.trans(k1)))
            if D2 > 0:
                k2, k2_odd = device.pairs(k_rows, w2, DK, SPAN + D2)
                logits = tl.dot(p2_odd, tl.trans(k2_odd), tl.dot(p2, tl.trans(k2), logits))
        else:
            k1 = device.columns(k_rows, d1, SPAN, D1, q.dtype.element_ty)
            logits = tl.dot(p1, tl.trans(k1), input_precision=PRECISION)
            if D2 > 0:
                k2 = device.columns(k_rows, d2, DK, SPAN + D2, q.dtype.element_ty)
                logits = tl.dot(p2, tl.trans(k2), logits, input_precision=PRECISION)
        logits = device.scaled(logits, scale * k_scale * unit, softcap, SOFTCAP)
        visible = (n < prefix)[None, :]
        if WINDOW:
            visible = visible & (at[:, None] - (start + n)[None, :] <= window)
        logits = tl.where(visible, logits, float("-inf"))
        p, alpha, m_i, l_i = device.softmax(logits, m_i, l_i, WINDOW)
        acc = acc * alpha[:, None]
        if PAIRS:
            values = k1
            values_odd = k1_odd
            if not LATENT:
                values, values_odd = device.pairs(v_rows, wv, DV, BLOCK_DV)
            p = p.to(tl.float16)
            acc = tl.dot(p, values, acc)
            acc_odd = tl.dot(p, values_odd, acc_odd * alpha[:, None])
        else:
            values = k1
            if not LATENT:
                values = device.columns(v_rows, dv, DV, BLOCK_DV, q.dtype.element_ty)
            acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
    if PAIRS:
        acc = tl.reshape(tl.join(acc, acc_odd), [M, BLOCK_DV])

    if PDL:
        gdc_launch_dependents()  # the merge may start, and works out the same schedule before it waits
    # The draft tokens, under the mask; only a request's last split has any.
    if DRAFT == "dense":
        acc = acc * v_scale
        draft_scale = scale
    else:
        draft_scale = scale * k_scale
    tail = tl.where(i - first == splits - 1, length, 0)
    if PAIRS:  # read again, rather than kept in registers over the loop
        q1 = tl.load(q_rows + d1[None, :], mask=row_ok[:, None] & (d1 < SPAN)[None, :], other=0.0)
        if D2 > 0:
            q2 = tl.load(q_rows + d2[None, :], mask=row_ok[:, None] & (d2 < DK)[None, :], other=0.0)
    m_i, l_i, acc = device.draft_tokens(
        m_i, l_i, acc, q1, q2, k, v, draft_k, draft_v, draft_slots, table_row, mask, mask_indptr, mask_start, positions,
        q_first, length, listed, prefix, start + prefix, tail, r, h.to(tl.int64), t, at, row_ok, d1, d2, dv,
        draft_scale, softcap, window,
        stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_dkt, stride_dkh, stride_dvt, stride_dvh, stride_mask,
        DK, DV, BLOCK_L, SPAN, D2, PAGE_SIZE, LATENT, DRAFT, MASK, MASK_INDPTR, MASK_STRIDE, WINDOW, POSITIONS, SOFTCAP, PRECISION,
    )  # fmt: skip
    if DRAFT != "dense":
        acc = acc * v_scale

    if splits == 1:
        device.finish(
            m_i, l_i, acc, out, lse, sinks, q_first, t, head, dv, row_ok, stride_ot, stride_oh, HKV, G, DV, SINKS, LSE
        )  # fmt: skip
    else:
        inside = row_ok & (rows < ROWS)  # rows past max_query_len have no place there
        result = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
        part = (i.to(tl.int64) * HKV + h) * ROWS + rows
        tl.store(parts + part[:, None] * DV + dv[None, :], result, mask=inside[:, None] & (dv < DV)[None, :])
        tl.store(parts + lse_at + part, m_i + tl.log2(l_i), mask=inside)
        if LAST_MERGES:
            counter = parts.to(tl.pointer_type(tl.int32), bitcast=True) - COUNTERS + r * (HKV * ROW_BLOCKS) + tl.program_id(0)
            tl.debug_barrier()  # all of this program's stores come before its arrival
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
                tl.store(counter, 0)  # for the next launch
                m_all = tl.full([M], float("-inf"), dtype=tl.float32)
                l_all = tl.zeros([M], dtype=tl.float32)
                all_parts = tl.zeros([M, BLOCK_DV], dtype=tl.float32)
                for s in tl.range(0, splits, num_stages=4):  # in split order, whoever is last
                    part = ((first + s).to(tl.int64) * HKV + h) * ROWS + rows
                    part_m = tl.load(parts + lse_at + part, mask=inside, other=float("-inf"), cache_modifier=".cg")
                    values = tl.load(
                        parts + part[:, None] * DV + dv[None, :], mask=inside[:, None] & (dv < DV)[None, :], other=0.0, cache_modifier=".cg"
                    )
                    m_new = tl.maximum(m_all, part_m)
                    base = tl.where(m_new == float("-inf"), 0.0, m_new)
                    alpha = tl.exp2(m_all - base)
                    weight = tl.exp2(part_m - base)
                    l_all = l_all * alpha + weight
                    all_parts = all_parts * alpha[:, None] + values * weight[:, None]
                    m_all = m_new
                device.finish(
                    m_all, l_all, all_parts, out, lse, sinks, q_first, t, head, dv, row_ok, stride_ot, stride_oh, HKV, G, DV, SINKS, LSE
                )  # fmt: skip


# For caches that are not aligned: in which of their addresses and strides, a prepared kernel cannot know.
split_kernel_of_any_alignment = triton.jit(
    split_kernel.fn,
    do_not_specialize=VARYING,
    do_not_specialize_on_alignment=["k", "v", "stride_kp", "stride_kt", "stride_kh", "stride_vp", "stride_vt", "stride_vh"],
)


@triton.jit(do_not_specialize=VARYING[:-1])
def merge_kernel(
    out, lse, parts, lse_at, cu_q, lens, kv_start, sinks,
    num_requests, table_keys, window, target, min_tiles, max_splits, stride_ot, stride_oh,
    HKV: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, MERGED: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr, PAGED: tl.constexpr, DRAFT: tl.constexpr,
    WINDOW: tl.constexpr, POSITIONS: tl.constexpr, KV_START: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h * blocks + b, r): the partial results of MERGED rows, weighted by their share of the softmax mass, in split order."""
    blocks: tl.constexpr = (ROWS + MERGED - 1) // MERGED
    h = tl.program_id(0) // blocks
    rows = tl.program_id(0) % blocks * MERGED + tl.arange(0, MERGED)
    r = tl.program_id(1)
    first, splits = device.splits_of(
        r, tl.arange(0, BLOCK_R), tl.arange(0, 8), cu_q, lens, kv_start, num_requests, table_keys, window, target, min_tiles, max_splits,
        BLOCK_R, BLOCK_N, PAGED, DRAFT, WINDOW, POSITIONS,
    )  # fmt: skip
    q_first, length, listed, prefix = device.lengths(cu_q, lens, r, table_keys, PAGED, DRAFT, r < num_requests)
    if PDL:
        gdc_wait()  # in every program: the merge may not end before the split kernel has
    if splits <= 1:
        return
    t = rows // G
    row_ok = t < length  # and so below ROWS
    dv = tl.arange(0, BLOCK_DV)
    m_i = tl.full([MERGED], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([MERGED], dtype=tl.float32)
    acc = tl.zeros([MERGED, BLOCK_DV], dtype=tl.float32)
    for s0 in range(0, splits, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        inside = (s < splits)[:, None] & row_ok[None, :]
        part = ((first + s).to(tl.int64) * HKV + h)[:, None] * ROWS + rows[None, :]
        part_m = tl.load(parts + lse_at + part, mask=inside, other=float("-inf"))
        values = tl.load(parts + part[:, :, None] * DV + dv, mask=inside[:, :, None] & (dv < DV), other=0.0)
        m_new = tl.maximum(m_i, tl.max(part_m, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - base)
        weight = tl.exp2(part_m - base[None, :])
        l_i = l_i * alpha + tl.sum(weight, 0)
        acc = acc * alpha[:, None] + tl.sum(values * weight[:, :, None], 0)
        m_i = m_new
    device.finish(
        m_i, l_i, acc, out, lse, sinks, q_first, t, h * G + rows % G, dv, row_ok, stride_ot, stride_oh, HKV, G, DV, SINKS, LSE
    )  # fmt: skip
