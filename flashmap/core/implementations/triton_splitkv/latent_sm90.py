"""The split kernel for latent attention (MLA, 512 + 64) on Hopper, in Gluon.

Plain Triton issues a tile's loads after the work on the tile before it, so that one of the two always waits. Here the
loads of tile i + 1 run during all of tile i.

64 rows and two warpgroups: both compute half the keys' logits of a [64, 64] tile, and each 256 of the 512 columns of the
output. K's first 512 columns lie once in shared memory and serve both products. Tiles of an fp8 cache take half the room on
their way, and are made fp16 beside it, once for both products. Arguments, grid and results are those of
``kernels.split_kernel``; windows are left to it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from flashmap.core.implementations.triton_splitkv import device
from flashmap.core.implementations.triton_splitkv.device import VARYING


@gluon.jit(do_not_specialize=VARYING)
def latent_kernel(
    q, k, v, out, lse, parts, lse_at,
    cu_q, lens, table, kv_start,
    draft_k, draft_v, draft_slots, mask, mask_indptr, positions, sinks, k_scale_ptr, v_scale_ptr,
    num_requests, table_keys, scale, k_scale, v_scale, softcap, window, target, min_tiles, max_splits,
    stride_qt, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_ot, stride_oh,
    stride_table, stride_dkt, stride_dkh, stride_dvt, stride_dvh, stride_mask,
    HKV: gl.constexpr, G: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr,
    ROW_BLOCKS: gl.constexpr, ROWS: gl.constexpr, M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_L: gl.constexpr,
    BLOCK_R: gl.constexpr, SPAN: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, BLOCK_DV: gl.constexpr,
    PAGED: gl.constexpr, PAGE_SIZE: gl.constexpr, LATENT: gl.constexpr, DRAFT: gl.constexpr, MASK: gl.constexpr,
    MASK_INDPTR: gl.constexpr, MASK_STRIDE: gl.constexpr, WINDOW: gl.constexpr, POSITIONS: gl.constexpr,
    KV_START: gl.constexpr, SINKS: gl.constexpr, SOFTCAP: gl.constexpr, LSE: gl.constexpr,
    K_SCALE_ON_DEVICE: gl.constexpr, V_SCALE_ON_DEVICE: gl.constexpr, PAIRS: gl.constexpr, LAST_MERGES: gl.constexpr, PRECISION: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Program (b, i): row block b over the i-th split of the batch, as in ``kernels.split_kernel``."""
    WARPS_N: gl.constexpr = gl.num_warps() // 4
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, WARPS_N], instr_shape=[16, BLOCK_N // WARPS_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, WARPS_N], instr_shape=[16, 256, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUTPUT, k_width=2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    REQUESTS: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [gl.num_warps(), 1], [1, 0])
    SCAN: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    SMEM: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # An fp8 cache is copied as it is, and a tile of it becomes fp16 in shared memory before its products.
    FP8: gl.constexpr = k.dtype.element_ty.primitive_bitwidth == 8
    DTYPE: gl.constexpr = gl.float16 if FP8 else q.dtype.element_ty
    COPY_WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [gl.num_warps(), 1], [1, 0]) if FP8 else WIDE
    COPY_NARROW: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [gl.num_warps(), 1], [1, 0]) if FP8 else NARROW
    RAW: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    BUFFERS: gl.constexpr = 1 if FP8 else 2

    row_block = gl.program_id(0)
    i = gl.program_id(1)
    index = gl.arange(0, BLOCK_R, gl.SliceLayout(1, REQUESTS))
    eighths = gl.arange(0, 8, gl.SliceLayout(0, REQUESTS))
    r, first, splits, total, mask_start = device.schedule(
        i, index, eighths, cu_q, lens, kv_start, num_requests, table_keys, window, target, min_tiles, max_splits,
        BLOCK_R, BLOCK_N, PAGED, DRAFT, False, POSITIONS, KV_START, MASK == "full" and not MASK_INDPTR, SCAN,
    )  # fmt: skip
    if i >= total:
        return
    q_first, length, listed, prefix = device.lengths(cu_q, lens, r, table_keys, PAGED, DRAFT, r < num_requests)
    if row_block * M >= length * G:
        return

    if K_SCALE_ON_DEVICE:
        k_scale = k_scale * gl.load(k_scale_ptr).to(gl.float32)
    if V_SCALE_ON_DEVICE:
        v_scale = v_scale * gl.load(v_scale_ptr).to(gl.float32)
    if PAGED:
        table_row = table + r.to(gl.int64) * stride_table
    else:
        table_row = table + gl.load(lens + r)
    start = 0
    if KV_START:
        start = gl.load(kv_start + r).to(gl.int32)

    d1 = gl.arange(0, D1, gl.SliceLayout(0, WIDE))
    d2 = SPAN + gl.arange(0, D2, gl.SliceLayout(0, NARROW))
    query_wide = _query(q, q_first, row_block * M, length, d1, stride_qt, stride_qh, G, M, WIDE)
    query_narrow = _query(q, q_first, row_block * M, length, d2, stride_qt, stride_qh, G, M, NARROW)
    unit = 1.0
    if FP8:  # no row may leave fp16's range
        query_wide = query_wide.to(gl.float32)
        query_narrow = query_narrow.to(gl.float32)
        largest = gl.max(gl.maximum(query_wide, -query_wide), 1)
        largest_narrow = gl.max(gl.maximum(query_narrow, -query_narrow), 1)
        largest = gl.maximum(largest, gl.convert_layout(largest_narrow, gl.SliceLayout(1, WIDE)))
        power = device.power_of_two(largest)
        query_wide = query_wide / power[:, None]
        query_narrow = query_narrow / gl.convert_layout(power, gl.SliceLayout(1, NARROW))[:, None]
        unit = gl.convert_layout(power, gl.SliceLayout(1, LOGITS))[:, None]
    q1 = gl.allocate_shared_memory(DTYPE, [M, D1], SMEM, query_wide.to(DTYPE))
    q2 = gl.allocate_shared_memory(DTYPE, [M, D2], SMEM, query_narrow.to(DTYPE))
    k1 = gl.allocate_shared_memory(DTYPE, [BUFFERS, BLOCK_N, D1], SMEM)
    k2 = gl.allocate_shared_memory(DTYPE, [BUFFERS, BLOCK_N, D2], SMEM)
    copied1 = k1
    copied2 = k2
    if FP8:
        copied1 = gl.allocate_shared_memory(k.dtype.element_ty, [2, BLOCK_N, D1], RAW)
        copied2 = gl.allocate_shared_memory(k.dtype.element_ty, [2, BLOCK_N, D2], RAW)

    tiles = gl.cdiv(prefix, BLOCK_N)
    share = gl.cdiv(tiles, splits)
    begin = (i - first) * share
    end = gl.minimum(begin + share, tiles)
    n_wide = gl.arange(0, BLOCK_N, gl.SliceLayout(1, WIDE))
    n_narrow = gl.arange(0, BLOCK_N, gl.SliceLayout(1, NARROW))
    n_logits = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LOGITS))
    copy_d1 = gl.arange(0, D1, gl.SliceLayout(0, COPY_WIDE))
    copy_d2 = SPAN + gl.arange(0, D2, gl.SliceLayout(0, COPY_NARROW))
    copy_n1 = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY_WIDE))
    copy_n2 = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY_NARROW))

    m_i = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    l_i = gl.zeros([M, BLOCK_N], gl.float32, LOGITS)
    acc = gl.zeros([M, BLOCK_DV], gl.float32, OUTPUT)
    nothing = gl.zeros([M, BLOCK_N], gl.float32, LOGITS)

    if begin < end:
        rows_wide = _rows(k, table_row, begin, prefix, copy_n1, stride_kp, stride_kt, PAGE_SIZE, BLOCK_N)
        rows_narrow = _rows(k, table_row, begin, prefix, copy_n2, stride_kp, stride_kt, PAGE_SIZE, BLOCK_N)
        async_copy.async_copy_global_to_shared(copied1.index(0), rows_wide + copy_d1[None, :])
        async_copy.async_copy_global_to_shared(copied2.index(0), rows_narrow + copy_d2[None, :])
    async_copy.commit_group()
    for tile in range(begin, end):
        this = (tile - begin) % 2
        async_copy.wait_group(0)
        gl.thread_barrier()
        place = this
        if FP8:
            place = this * 0
            for part in gl.static_range(4):  # in parts, which take fewer registers at a time
                few = copied1.index(this).slice(part * (BLOCK_N // 4), BLOCK_N // 4).load(COPY_WIDE)
                k1.index(0).slice(part * (BLOCK_N // 4), BLOCK_N // 4).store(few.to(DTYPE))
            k2.index(0).store(copied2.index(this).load(COPY_NARROW).to(DTYPE))
            gl.thread_barrier()
        fence_async_shared()
        logits = warpgroup_mma(q1, k1.index(place).permute((1, 0)), nothing, use_acc=False, is_async=True)
        logits = warpgroup_mma(q2, k2.index(place).permute((1, 0)), logits, is_async=True)
        # The other buffer is free: all warps are past the barrier above, so past the products with the tile before.
        ahead = gl.minimum(tile + 1, end - 1)
        keys_ahead = (end - 1 - tile) * BLOCK_N  # 0 for the last tile: its copies are masked, and write zeros
        rows_wide = _rows(k, table_row, ahead, prefix, copy_n1, stride_kp, stride_kt, PAGE_SIZE, BLOCK_N)
        rows_narrow = _rows(k, table_row, ahead, prefix, copy_n2, stride_kp, stride_kt, PAGE_SIZE, BLOCK_N)
        async_copy.async_copy_global_to_shared(copied1.index(1 - this), rows_wide + copy_d1[None, :], mask=(copy_n1 < keys_ahead)[:, None])
        async_copy.async_copy_global_to_shared(
            copied2.index(1 - this), rows_narrow + copy_d2[None, :], mask=(copy_n2 < keys_ahead)[:, None]
        )
        async_copy.commit_group()
        logits = warpgroup_mma_wait(0, deps=[logits])

        x = device.scaled(logits, scale * k_scale * unit, softcap, SOFTCAP)
        x = gl.where((tile * BLOCK_N + n_logits < prefix)[None, :], x, float("-inf"))
        m_new = gl.maximum(m_i, gl.max(x, 1))
        alpha = gl.exp2(m_i - m_new)
        p = gl.exp2(x - m_new[:, None])
        l_i = l_i * alpha[:, None] + p  # summed over the keys once, at the end
        m_i = m_new
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUTPUT))[:, None]
        acc = warpgroup_mma(gl.convert_layout(p.to(DTYPE), WEIGHTS), k1.index(place), acc, is_async=True)
        # ptxas serialises products that are in flight at the end of a loop's body (C7514).
        acc = warpgroup_mma_wait(0, deps=[acc])
    l_row = gl.sum(l_i, 1)
    async_copy.wait_group(0)  # the last, masked copies write zeros where the draft tokens go

    if PDL:
        gdc_launch_dependents()
    # The draft tokens, under the mask; only a request's last split has any. Rows of a tile that do not exist are zeros.
    t_logits = (row_block * M + gl.arange(0, M, gl.SliceLayout(1, LOGITS))) // G
    draft_scale = scale * k_scale
    if DRAFT == "dense":
        acc = acc * v_scale
        draft_scale = scale
    tail = gl.where(i - first == splits - 1, length, 0)
    for j0 in range(0, tail, BLOCK_N):
        limit = length
        if DRAFT == "cache":
            limit = gl.minimum(length, listed - prefix)
        wide, _ = device.draft_rows(
            k, v, draft_k, draft_v, draft_slots, table_row, q_first, prefix, j0 + n_wide, j0 + n_wide < limit, 0,
            stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
            PAGE_SIZE, DRAFT,
        )  # fmt: skip
        narrow, _ = device.draft_rows(
            k, v, draft_k, draft_v, draft_slots, table_row, q_first, prefix, j0 + n_narrow, j0 + n_narrow < limit, 0,
            stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
            PAGE_SIZE, DRAFT,
        )  # fmt: skip
        gl.thread_barrier()
        k1.index(0).store(gl.load(wide + d1[None, :], mask=(j0 + n_wide < limit)[:, None], other=0.0).to(DTYPE))
        k2.index(0).store(gl.load(narrow + d2[None, :], mask=(j0 + n_narrow < limit)[:, None], other=0.0).to(DTYPE))
        gl.thread_barrier()
        fence_async_shared()
        logits = warpgroup_mma(q1, k1.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
        logits = warpgroup_mma(q2, k2.index(0).permute((1, 0)), logits, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        x = device.scaled(logits, draft_scale * unit, softcap, SOFTCAP)
        j = j0 + n_logits
        sees = (t_logits < length)[:, None] & (j < limit)[None, :]
        sees = sees & device.allowed(
            mask, mask_indptr, mask_start, r, q_first, length, start + prefix, t_logits, j, j0, t_logits < length,
            stride_mask, MASK, MASK_INDPTR, MASK_STRIDE, BLOCK_L,
        )  # fmt: skip
        x = gl.where(sees, x, float("-inf"))
        p, alpha, m_i, l_row = device.softmax(x, m_i, l_row, True)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUTPUT))[:, None]
        acc = warpgroup_mma(gl.convert_layout(p.to(DTYPE), WEIGHTS), k1.index(0), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    if DRAFT != "dense":
        acc = acc * v_scale

    row = row_block * M + gl.arange(0, M, gl.SliceLayout(1, OUTPUT))
    m_row = gl.convert_layout(m_i, gl.SliceLayout(1, OUTPUT))
    l_row = gl.convert_layout(l_row, gl.SliceLayout(1, OUTPUT))
    dv = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, OUTPUT))
    t = row // G
    head = row % G
    row_ok = t < length
    if splits == 1:
        device.finish(
            m_row, l_row, acc, out, lse, sinks, q_first, t, head, dv, row_ok, stride_ot, stride_oh, HKV, G, DV, SINKS, LSE
        )  # fmt: skip
    else:
        part = i.to(gl.int64) * ROWS + row
        inside = row_ok & (row < ROWS)  # rows past max_query_len have no place there
        result = acc / gl.where(l_row > 0, l_row, 1.0)[:, None]
        gl.store(parts + part[:, None] * DV + dv[None, :], result, mask=inside[:, None])
        gl.store(parts + lse_at + part, m_row + gl.log2(l_row), mask=inside)


@gluon.jit
def _query(q, q_first, row, length, d, stride_qt, stride_qh, G: gl.constexpr, M: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns d of rows ``row`` to ``row + M``; 0 where there is no query token."""
    rows = row + gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    t = rows // G
    q_rows = q + (q_first + t).to(gl.int64)[:, None] * stride_qt + (rows % G)[:, None] * stride_qh
    return gl.load(q_rows + d[None, :], mask=(t < length)[:, None], other=0.0)


@gluon.jit
def _rows(k, table_row, tile, prefix, n, stride_kp, stride_kt, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Pointers [BLOCK_N, 1] to a tile's keys. Keys past the prefix repeat its last one, so that no load needs a mask."""
    key = gl.minimum(tile * BLOCK_N + n, prefix - 1)
    if PAGE_SIZE % BLOCK_N == 0:
        page = gl.load(table_row + tile * BLOCK_N // PAGE_SIZE).to(gl.int64)
        return k + page * stride_kp + (key % PAGE_SIZE * stride_kt)[:, None]
    pages = gl.load(table_row + key // PAGE_SIZE).to(gl.int64)
    return k + (pages * stride_kp + key % PAGE_SIZE * stride_kt)[:, None]
