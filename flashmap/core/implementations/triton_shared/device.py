"""What the Triton implementations share on the device: lengths, where draft tokens lie, masks, logits, softmax.

The functions create no tensors of their own but get index vectors from the kernel, which may be written in Triton or in
Gluon: Gluon's carry a layout. ``draft_tokens`` does, and is for Triton alone.
"""

import os

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # Triton's interpreter has no machine instructions


@triton.jit
def lengths(cu_q, lens, r, table_keys, PAGED: tl.constexpr, DRAFT: tl.constexpr, inside):
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
def columns(rows, d, END: tl.constexpr, BLOCK_END: tl.constexpr, dtype: tl.constexpr):
    """Columns d of the rows at ``rows`` [n, 1] as ``dtype``; those from END on are 0, unmasked where END is the block's end."""
    if END == BLOCK_END:
        values = tl.load(rows + d[None, :])
    else:
        values = tl.load(rows + d[None, :], mask=(d < END)[None, :], other=0.0)
    return values.to(dtype)


@triton.jit
def pairs(rows, words, END: tl.constexpr, BLOCK_END: tl.constexpr):
    """Columns 2 * words and 2 * words + 1 of the fp8 rows at ``rows`` [n, 1], each as fp16; those from END on are 0.

    They are read as 16-bit words, as tensor cores get their operands transposed in words and not in bytes.
    """
    at = rows.to(tl.pointer_type(tl.int16), bitcast=True) + words[None, :]
    if END == BLOCK_END:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(2 * words < END)[None, :], other=0)
    if rows.dtype.element_ty == tl.float8e5:  # the upper half of an fp16
        even = (x << 8).to(tl.float16, bitcast=True)
        odd = (x >> 8 << 8).to(tl.float16, bitcast=True)
    elif INTERPRETED:
        even = x.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = (x >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:  # two columns of a row become a pair in fp16, and the pairs of two rows change halves
        even, odd = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high; .reg .b32 first, second;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            prmt.b32 $0, first, second, 0x5410;
            prmt.b32 $1, first, second, 0x7632; }""",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return even, odd


@triton.jit
def scaled(logits, scale, softcap, SOFTCAP: tl.constexpr):
    """Base-2 logits: scaled, soft-capped (tanh by exp2, which saturates without overflow), times log2 e."""
    if SOFTCAP:
        doubled = tl.exp2(logits * (2.0 * LOG2E * scale / softcap))
        logits = (softcap * LOG2E) * (1.0 - 2.0 / (doubled + 1.0))
    else:
        logits = logits * (scale * LOG2E)
    return logits


@triton.jit
def softmax(logits, m_i, l_i, MAY_BE_EMPTY: tl.constexpr):
    """One step of the online softmax: (weights, factor of what was accumulated before, maximum, denominator)."""
    m_new = tl.maximum(m_i, tl.max(logits, 1))
    base = m_new
    if MAY_BE_EMPTY:
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m_i - base)
    p = tl.exp2(logits - base[:, None])
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def draft_rows(
    k, v, draft_k, draft_v, draft_slots, table_row, q_first, prefix, j, exists, h,
    stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    PAGE_SIZE: tl.constexpr, DRAFT: tl.constexpr,
):  # fmt: skip
    """Where draft tokens j have K and V: pointers [BLOCK_L, 1]."""
    if DRAFT == "dense":
        token = (q_first + j).to(tl.int64)
        k_rows = draft_k + token[:, None] * stride_dkt + h * stride_dkh
        v_rows = draft_v + token[:, None] * stride_dvt + h * stride_dvh
    else:
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
def allowed(
    mask, mask_indptr, mask_start, r, q_first, length, before, t, j, j0, row_ok,
    stride_mask, MASK: tl.constexpr, MASK_INDPTR: tl.constexpr, MASK_STRIDE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Which draft tokens j each row's token t sees by the mask: bool [M, BLOCK_L]. ``j0`` is the first j; BITS at most 64.

    Bytes become the bits of one word a row. A load of the byte matrix would have to move to the layout of the logits,
    which on an H200 cost registers enough to slow the loop over the prefix by a fifth.
    """
    if MASK == "none":
        sees = j[None, :] <= t[:, None]
    else:
        if MASK == "packed":
            word = tl.load(mask + (q_first + t).to(tl.int64) * stride_mask + j0 // 64, mask=row_ok, other=0) >> (j0 % 64)
        else:
            if MASK_INDPTR:
                block_start = tl.load(mask_indptr + r).to(tl.int64)
            elif MASK == "full":
                block_start = mask_start
            else:
                block_start = r.to(tl.int64) * MASK_STRIDE * MASK_STRIDE
            if MASK == "full":
                row_start = t.to(tl.int64) * (before + length) + before
            elif MASK_INDPTR:
                row_start = t.to(tl.int64) * length
            else:
                row_start = t.to(tl.int64) * MASK_STRIDE
            word = t.to(tl.int64) * 0
            for first in tl.range(0, tl.minimum(length - j0, BITS), 8, num_stages=1):
                for bit in tl.static_range(8):
                    column = j0 + first + bit
                    entry = tl.load(mask + block_start + row_start + column, mask=row_ok & (column < length), other=0)
                    word |= (entry != 0).to(tl.int64) << (first + bit)
        sees = ((word[:, None] >> (j - j0).to(tl.int64)[None, :]) & 1) != 0
    return sees


@triton.jit
def draft_tokens(
    m_i, l_i, acc, q1, q2, k, v, draft_k, draft_v, draft_slots, table_row, mask, mask_indptr, mask_start, positions,
    q_first, length, listed, prefix, before, end, r, h, t, at, row_ok, d1, d2, dv, scale, softcap, window,
    stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_dkt, stride_dkh, stride_dvt, stride_dvh, stride_mask,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_L: tl.constexpr, SPAN: tl.constexpr, D2: tl.constexpr, PAGE_SIZE: tl.constexpr,
    LATENT: tl.constexpr, DRAFT: tl.constexpr, MASK: tl.constexpr, MASK_INDPTR: tl.constexpr, MASK_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, POSITIONS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax (m_i, l_i, acc) of rows [M], with draft tokens 0 to ``end`` added under the mask.

    ``q1`` [M, D1] and, where D2 > 0, ``q2`` [M, D2] hold columns ``d1`` and ``d2`` of the rows' queries. ``before``: the
    sequence's keys before draft token 0, listed or not. ``at`` [M], the rows' positions, and ``window`` matter with WINDOW alone,
    ``positions`` with POSITIONS, ``softcap`` with SOFTCAP.
    """
    for j0 in tl.range(0, end, BLOCK_L, num_stages=1):
        j = j0 + tl.arange(0, BLOCK_L)
        exists = j < length
        if DRAFT == "cache":
            exists = exists & (prefix + j < listed)
        k_rows, v_rows = draft_rows(
            k, v, draft_k, draft_v, draft_slots, table_row, q_first, prefix, j, exists, h,
            stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
            PAGE_SIZE, DRAFT,
        )  # fmt: skip
        k1 = tl.load(k_rows + d1[None, :], mask=exists[:, None] & (d1 < SPAN)[None, :], other=0.0).to(q1.dtype)
        logits = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        if D2 > 0:
            k2 = tl.load(k_rows + d2[None, :], mask=exists[:, None] & (d2 < DK)[None, :], other=0.0).to(q1.dtype)
            logits = tl.dot(q2, tl.trans(k2), logits, input_precision=PRECISION)
        logits = scaled(logits, scale, softcap, SOFTCAP)
        sees = row_ok[:, None] & exists[None, :]
        sees = sees & allowed(
            mask, mask_indptr, mask_start, r, q_first, length, before, t, j, j0, row_ok,
            stride_mask, MASK, MASK_INDPTR, MASK_STRIDE, BLOCK_L,
        )  # fmt: skip
        if WINDOW:
            if POSITIONS:
                at_j = tl.load(positions + q_first + j, mask=exists, other=0).to(tl.int32)
            else:
                at_j = before + j
            sees = sees & (at[:, None] - at_j[None, :] <= window)
        logits = tl.where(sees, logits, float("-inf"))
        p, alpha, m_i, l_i = softmax(logits, m_i, l_i, True)
        if LATENT:
            values = k1
        else:
            values = tl.load(v_rows + dv[None, :], mask=exists[:, None] & (dv < DV)[None, :], other=0.0).to(q1.dtype)
        acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
    return m_i, l_i, acc


@triton.jit
def finish(
    m_i, l_i, acc, out, lse, sinks, q_first, t, head, dv, row_ok, stride_ot, stride_oh,
    HKV: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Write the result of rows [M] with all their keys seen: the sink joins, and a row that has seen nothing gives 0 and -inf."""
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        m_new = tl.maximum(m_i, sink)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen, and no sink either
        alpha = tl.exp2(m_i - base)
        l_i = l_i * alpha + tl.exp2(sink - base)
        acc = acc * alpha[:, None]
        m_i = m_new
    result = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
    o_rows = out + (q_first + t).to(tl.int64)[:, None] * stride_ot + head[:, None] * stride_oh
    tl.store(o_rows + dv[None, :], result.to(out.dtype.element_ty), mask=row_ok[:, None] & (dv < DV)[None, :])
    if LSE:
        tl.store(lse + (q_first + t).to(tl.int64) * (HKV * G) + head, (m_i + tl.log2(l_i)) * LN2, mask=row_ok)
