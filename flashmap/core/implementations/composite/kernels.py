"""The Triton kernels of ``composite``: what a library's attention needs before it, and the draft tokens and the merge after it.

Shapes: R requests; L_r query tokens of request r, at most L; Hkv KV heads with G query heads each; row ``t * G + g`` of a KV
head is query head ``h * G + g`` at token t, so a head's rows lie in row blocks of M. Draft tokens come in tiles of BLOCK_L.

Numbers: fp32 accumulation, softmax in base 2. The library's result is normalised, with its natural log-sum-exp. A row that
sees nothing gives 0 and -inf. Offsets into tensors are 64-bit.

Called by launch.py alone, which defines every argument. Must not: read anything that is not listed for a request, trust
what a library gives for a request without a prefix, or depend on a host value that a graph replay may change.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from flashmap.core.implementations.triton_shared import device
from flashmap.core.implementations.triton_shared.device import LOG2E

# Arguments that vary from call to call without another compilation being better for it.
VARYING = ["num_requests", "table_keys", "stride_table", "stride_plr", "stride_plt", "stride_plh", "stride_mask"]


@triton.jit(do_not_specialize=["num_requests", "table_keys"])
def lengths_kernel(
    cu_q, lens, keys, starts, pad, num_requests, table_keys, DRAFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i: for requests i * BLOCK on, as int32: ``keys`` [R] of the prefix, ``starts`` [R + 1] = cu_q, ``pad`` [R] = 0.

    A request without query tokens gets no keys: nobody is to work for it.
    """
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = r < num_requests
    _, length, _, prefix = device.lengths(cu_q, lens, r, table_keys, True, DRAFT, inside)
    tl.store(keys + r, tl.where(length > 0, prefix, 0), mask=inside)
    tl.store(starts + r, tl.load(cu_q + r, mask=r <= num_requests, other=0).to(tl.int32), mask=r <= num_requests)
    tl.store(pad + r, tl.zeros([BLOCK], dtype=tl.int32), mask=inside)


@triton.jit(do_not_specialize=["num_requests", "table_keys"])
def pack_kernel(
    q, packed, cu_q, lens, keys, num_requests, table_keys, stride_qt, stride_qh,
    H: tl.constexpr, L: tl.constexpr, SPAN: tl.constexpr, REST: tl.constexpr, DRAFT: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Program (r, t, b): query token t of request r, heads b * BLOCK_H on, to ``packed`` [R, L, H, SPAN + REST]; rows past L_r stay.

    And ``keys`` [R]: int32, keys of the prefix. At least 1, as a library may start to copy a first page whatever the length:
    what it computes for a request without a prefix is not used.
    """
    r = tl.program_id(0)
    t = tl.program_id(1)
    q_first, length, _, prefix = device.lengths(cu_q, lens, r, table_keys, True, DRAFT, r < num_requests)
    if t == 0 and tl.program_id(2) == 0:
        tl.store(keys + r, tl.maximum(tl.where(length > 0, prefix, 0), 1))
    if t >= length:
        return
    h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = (h < H)[:, None]
    source = q + (q_first + t).to(tl.int64) * stride_qt + h[:, None] * stride_qh
    target = packed + (r * L + t).to(tl.int64) * (H * (SPAN + REST)) + h[:, None] * (SPAN + REST)
    d1 = tl.arange(0, SPAN)[None, :]
    d2 = SPAN + tl.arange(0, REST)[None, :]
    tl.store(target + d1, tl.load(source + d1, mask=inside, other=0.0), mask=inside)
    tl.store(target + d2, tl.load(source + d2, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=VARYING)
def tail_kernel(
    q, k, v, out, lse, prefix_out, prefix_lse, used_q, used_k, starts, pad,
    cu_q, lens, table, kv_start, draft_k, draft_v, draft_slots, mask, mask_indptr, sinks,
    num_requests, table_keys, scale,
    stride_qt, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_ot, stride_oh,
    stride_por, stride_pot, stride_poh, stride_plr, stride_plt, stride_plh,
    stride_table, stride_dkt, stride_dkh, stride_dvt, stride_dvh, stride_mask,
    HKV: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    ROW_BLOCKS: tl.constexpr, M: tl.constexpr, BLOCK_L: tl.constexpr, SPAN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, LATENT: tl.constexpr, DRAFT: tl.constexpr, MASK: tl.constexpr,
    MASK_INDPTR: tl.constexpr, MASK_STRIDE: tl.constexpr, KV_START: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    PREFIX: tl.constexpr, PADDED: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h * ROW_BLOCKS + b, r): row block b of KV head h of request r over the draft tokens, merged with its prefix.

    PREFIX: ``prefix_out`` and ``prefix_lse`` hold a library's result, of token ``cu_q[r] + t`` at ``(cu_q[r] + t) * stride_t``,
    or where PADDED at ``r * stride_r + t * stride_t``. It may be ``out`` itself: a program reads its rows before it writes them.

    SHORT: before a library that does whole requests. Only requests with fewer keys than query tokens are computed, as libraries
    align a causal mask with the last key and the op with the first; for the library they get ``used_q`` 0. All others pass by.
    ``used_q``, ``used_k``, ``starts`` and ``pad`` are int32: query tokens, keys, cu_q and 0.
    """
    h = tl.program_id(0) // ROW_BLOCKS
    row_block = tl.program_id(0) % ROW_BLOCKS
    r = tl.program_id(1)
    q_first, length, listed, prefix = device.lengths(cu_q, lens, r, table_keys, True, DRAFT, r < num_requests)
    if SHORT:
        if tl.program_id(0) == 0:
            tl.store(used_q + r, tl.where(listed < length, 0, length))
            tl.store(used_k + r, tl.where(length > 0, tl.maximum(listed, 0), 0))
            tl.store(starts + r, q_first)
            tl.store(pad + r, 0)
            if r == num_requests - 1:
                tl.store(starts + num_requests, q_first + length)
        if listed >= length:
            return
    if row_block * M >= length * G:
        if PDL:
            gdc_wait()  # in every program: this kernel may not end before the library's has
        return

    rows = row_block * M + tl.arange(0, M)
    t = rows // G
    row_ok = t < length
    head = h * G + rows % G
    token = (q_first + t).to(tl.int64)
    q_rows = q + token[:, None] * stride_qt + head[:, None] * stride_qh
    d1 = tl.arange(0, D1)
    dv = tl.arange(0, BLOCK_DV)
    q1 = tl.load(q_rows + d1[None, :], mask=row_ok[:, None] & (d1 < SPAN)[None, :], other=0.0)
    q2, d2 = q1, d1  # not read unless D2 > 0
    if D2 > 0:
        d2 = SPAN + tl.arange(0, D2)
        q2 = tl.load(q_rows + d2[None, :], mask=row_ok[:, None] & (d2 < DK)[None, :], other=0.0)

    before = prefix
    if KV_START:
        before = prefix + tl.load(kv_start + r).to(tl.int32)
    mask_start = r.to(tl.int64) * 0
    if MASK == "full" and not MASK_INDPTR:  # blocks follow one another
        for r0 in tl.range(0, r, 128, num_stages=1):
            others = r0 + tl.arange(0, 128)
            earlier = others < r
            _, other_length, _, other_prefix = device.lengths(cu_q, lens, others, table_keys, True, DRAFT, earlier)
            width = other_prefix + other_length
            if KV_START:
                width = width + tl.load(kv_start + others, mask=earlier, other=0).to(tl.int32)
            mask_start += tl.sum(tl.where(earlier, other_length.to(tl.int64) * width.to(tl.int64), 0), 0)

    m_i = tl.full([M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([M], dtype=tl.float32)
    acc = tl.zeros([M, BLOCK_DV], dtype=tl.float32)
    table_row = table + r.to(tl.int64) * stride_table
    m_i, l_i, acc = device.draft_tokens(
        m_i, l_i, acc, q1, q2, k, v, draft_k, draft_v, draft_slots, table_row, mask, mask_indptr, mask_start, None,
        q_first, length, listed, prefix, before, length, r, h.to(tl.int64), t, t, row_ok, d1, d2, dv, scale, 0.0, 0,
        stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_dkt, stride_dkh, stride_dvt, stride_dvh, stride_mask,
        DK, DV, BLOCK_L, SPAN, D2, PAGE_SIZE, LATENT, DRAFT, MASK, MASK_INDPTR, MASK_STRIDE, False, False, False, PRECISION,
    )  # fmt: skip

    column_ok = row_ok[:, None] & (dv < DV)[None, :]
    if PREFIX:
        place = token
        if PADDED:
            place = t.to(tl.int64)
        if PDL:
            gdc_wait()
        some = row_ok & (prefix > 0)
        part_lse = prefix_lse + r.to(tl.int64) * stride_plr + place * stride_plt + head * stride_plh
        part_m = tl.load(part_lse, mask=some, other=float("-inf")) * LOG2E
        part_rows = prefix_out + r.to(tl.int64) * stride_por + place[:, None] * stride_pot + head[:, None] * stride_poh
        part = tl.load(part_rows + dv[None, :], mask=column_ok & (prefix > 0), other=0.0).to(tl.float32)
        m_new = tl.maximum(m_i, part_m)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - base)
        weight = tl.exp2(part_m - base)
        l_i = l_i * alpha + weight
        acc = acc * alpha[:, None] + part * weight[:, None]
        m_i = m_new
    device.finish(
        m_i, l_i, acc, out, lse, sinks, q_first, t, head, dv, row_ok, stride_ot, stride_oh, HKV, G, DV, SINKS, LSE
    )  # fmt: skip
