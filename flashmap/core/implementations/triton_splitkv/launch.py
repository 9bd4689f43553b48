"""From a checked call to the two launches. What can be known of a request beforehand is in its cached :class:`Plan`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmap.core.implementations.triton_splitkv import kernels
from flashmap.core.implementations.triton_splitkv.config import Config, config_for, request_block
from flashmap.core.implementations.triton_splitkv.scratch import scratch_of
from flashmap.core.inputs import Call, KVCache, PagedKV, SlotKV, TreeMask, resolve
from flashmap.core.interface import Reason
from flashmap.core.request import DeviceInfo, Limits, VerifyRequest

_TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches of one request: grids, compile-time constants, and ``partials``, the fp32 elements of scratch (0: no merge)."""

    config: Config
    target: int
    partials: int
    lse_at: int
    grid: tuple[int, int]
    constants: dict[str, Any]
    merge_grid: tuple[int, int]
    merge_constants: dict[str, Any]


def run(call: Call) -> None:
    """Launch. Allocates only when a stream first needs this much scratch, which ``not_ready`` rules out under capture."""
    device = DeviceInfo.of(call.q.device)
    plan = _plan(call.request, replace(device, capturing=False) if device.capturing else device)
    parts, lse_at = call.out, 0  # any pointer will do when nothing is merged
    if plan.partials:
        scratch = scratch_of(call.q.device)
        taken = scratch.take(plan.partials, _stream(call.q.device), capturing=device.capturing)
        assert taken is not None, "select() asks not_ready() before a call under capture"
        parts, lse_at = taken, plan.lse_at
        if not device.capturing:
            scratch.reserve(plan.partials)
    _launch(call, plan, parts, lse_at)


def not_ready(call: Call) -> tuple[Reason, ...]:
    """Scratch that a captured call lacks."""
    plan = _plan(call.request, replace(DeviceInfo.of(call.q.device), capturing=False))
    if not plan.partials or scratch_of(call.q.device).holds(plan.partials, _stream(call.q.device)):
        return ()
    text = f"a graph is being captured and the stream has no scratch of {plan.partials * 4} bytes"
    return (Reason("scratch", text, "call prepare(), or the op once with the same shapes, before the capture"),)


def prepare(request: VerifyRequest, limits: Limits, device: torch.device) -> None:
    """Reserve scratch for the worst call within ``limits`` and compile by launching calls whose requests are all empty."""
    info = replace(DeviceInfo.of(device), capturing=False)
    request = replace(request, num_requests=limits.max_requests, max_kv_len=None)
    sizes = [_plan(replace(request, max_query_len=length), info).partials for length in range(1, limits.max_query_len + 1)]
    if max(sizes):
        scratch_of(_indexed(device)).reserve(max(sizes))
    for requests in sorted({1, min(2, limits.max_requests), limits.max_requests}):
        call = _empty_call(replace(request, num_requests=requests), _indexed(device))
        _launch(call, _plan(call.request, info), torch.empty(1, dtype=torch.float32, device=device), 0)


def _indexed(device: torch.device) -> torch.device:
    """The device as tensors name it: "cuda" is "cuda:0" or whichever is current."""
    return torch.empty(0, device=device).device


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.lru_cache(maxsize=4096)
def _plan(request: VerifyRequest, device: DeviceInfo) -> Plan:
    config = config_for(request, device)
    assert config is not None, "why_not() declines what fits no tile"
    rows = request.group * request.max_query_len
    launched = config.launched_splits(request, device.sm_count)
    merges = launched > request.num_requests and config.max_splits > 1
    partials = launched * request.kv_heads * rows
    shared = dict(
        HKV=request.kv_heads,
        G=request.group,
        DV=request.v_head_dim,
        ROWS=rows,
        BLOCK_N=config.block_n,
        BLOCK_R=request_block(request.num_requests),
        BLOCK_DV=config.dv,
        PAGED=request.kv_layout == "paged",
        DRAFT=request.draft,
        WINDOW=request.window is not None,
        POSITIONS=request.positions,
        KV_START=request.kv_start,
        SINKS=request.sinks,
        LSE=request.return_lse,
        PDL=config.pdl,
    )
    constants = dict(
        shared,
        DK=request.head_dim,
        ROW_BLOCKS=config.row_blocks,
        M=config.m,
        BLOCK_L=config.block_l,
        SPAN=config.span,
        D1=config.d1,
        D2=config.rest,
        PAGE_SIZE=request.page_size,
        LATENT=request.latent,
        MASK=request.mask or "none",
        MASK_INDPTR=request.mask_indptr,
        MASK_STRIDE=request.max_query_len if request.mask == "qlen" else 0,
        SOFTCAP=request.softcap,
        DEVICE_SCALES=request.scales == "device",
        PRECISION="ieee" if request.dtype == "fp32" else "tf32",  # of fp32 dots alone
        num_warps=config.warps,
        num_stages=config.stages,
    )
    pdl = {"launch_pdl": True} if config.pdl else {}  # an option that older versions of Triton do not know
    return Plan(
        config=config,
        target=config.target(request.kv_heads, device.sm_count),
        partials=partials * (request.v_head_dim + 1) if merges else 0,
        lse_at=partials * request.v_head_dim,
        grid=(request.kv_heads * config.row_blocks, launched),
        constants=constants,
        merge_grid=(request.kv_heads * rows, request.num_requests),
        merge_constants=dict(shared, BLOCK_S=config.block_s, num_warps=config.merge_warps, **pdl),
    )


def _launch(call: Call, plan: Plan, parts: torch.Tensor, lse_at: int) -> None:
    q, out, kv, config = call.q, call.out, call.kv, plan.config
    unused = q  # stands for tensors that the constants say are not read
    lens, table, k_page, k_token, v, v_page, v_token = _cache_arguments(kv)
    lse = out if call.lse is None else call.lse
    draft_k = unused if call.draft_k is None else call.draft_k
    draft_v = draft_k if call.draft_v is None else call.draft_v
    kv_start = _or(kv.kv_start, unused)
    sinks = _or(call.sinks, unused)
    mask, mask_indptr, mask_row = _mask_arguments(call.mask, unused)
    k_scale, k_scale_ptr = _scale_arguments(call.k_scale, unused)
    v_scale, v_scale_ptr = _scale_arguments(call.k_scale if call.request.latent else call.v_scale, unused)
    table_keys = kv.max_kv_len or 0
    window = min(call.window or 0, 1 << 30)
    counts = (call.request.num_requests, table_keys)
    sharing = (window, plan.target, config.min_tiles, config.max_splits)
    k_head, v_head = kv.k.stride(-2), v.stride(-2)

    _split_kernel(config.kernel)[plan.grid](
        q, kv.k, v, out, lse, parts, lse_at,
        call.cu_seqlens_q, lens, table, kv_start,
        draft_k, draft_v, _or(call.draft_slots, unused), mask, mask_indptr, _or(call.positions, unused), sinks,
        k_scale_ptr, v_scale_ptr,
        *counts, call.scale, k_scale, v_scale, call.softcap, *sharing,
        q.stride(0), q.stride(1), k_page, k_token, k_head, v_page, v_token, v_head, out.stride(0), out.stride(1),
        table.stride(0), draft_k.stride(0), draft_k.stride(1), draft_v.stride(0), draft_v.stride(1), mask_row,
        **plan.constants,
    )  # fmt: skip
    if plan.partials:
        kernels.merge_kernel[plan.merge_grid](
            out, lse, parts, lse_at, call.cu_seqlens_q, lens, kv_start, sinks,
            *counts, *sharing, out.stride(0), out.stride(1), **plan.merge_constants,
        )  # fmt: skip


def _split_kernel(name: str) -> Any:
    if name == "split":
        return kernels.split_kernel
    from flashmap.core.implementations.triton_splitkv.latent_sm90 import latent_kernel

    return latent_kernel


def _cache_arguments(kv: KVCache) -> tuple[torch.Tensor, torch.Tensor, int, int, torch.Tensor, int, int]:
    """(lengths, table, K's page and token strides, V, V's page and token strides). A slot is a page of one token."""
    v = kv.k if kv.v is None else kv.v
    if isinstance(kv, PagedKV):
        return kv.kv_lens, kv.block_table, kv.k.stride(0), kv.k.stride(1), v, v.stride(0), v.stride(1)
    return kv.indptr, kv.indices, kv.k.stride(0), 0, v, v.stride(0), 0


def _mask_arguments(mask: TreeMask | None, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(bytes or words, indptr, words in a row)."""
    if mask is None:
        return unused, unused, 0
    data = mask.data.view(torch.uint8) if mask.data.dtype == torch.bool else mask.data
    return data, _or(mask.indptr, unused), data.stride(0)


def _scale_arguments(scale: float | torch.Tensor, unused: torch.Tensor) -> tuple[float, torch.Tensor]:
    """(factor, pointer): the value is their product where one of the scales is on the device."""
    return (1.0, scale) if isinstance(scale, torch.Tensor) else (float(scale), unused)


def _or(tensor: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    return unused if tensor is None else tensor


def _empty_call(request: VerifyRequest, device: torch.device) -> Call:
    """A call of this static shape in which every request is empty: it launches the kernels and writes nothing."""
    make = functools.partial(torch.zeros, device=device)
    dtype, kv_dtype = _TORCH[request.dtype], _TORCH[request.kv_dtype]

    def ints(name: str, *shape: int) -> torch.Tensor:
        return make(*shape, dtype=torch.int64 if name in request.int64 else torch.int32)

    requests, heads, length = request.num_requests, request.kv_heads, request.max_query_len
    rows = (1, request.page_size) if request.kv_layout == "paged" else (1,)
    k = make(*rows, heads, request.head_dim, dtype=kv_dtype)
    v = None if request.latent else make(*rows, heads, request.v_head_dim, dtype=kv_dtype)
    v_head_dim = request.v_head_dim if request.latent else None
    start = ints("kv_start", requests) if request.kv_start else None
    kv: KVCache
    if request.kv_layout == "paged":
        kv = PagedKV(k, v, ints("indices", requests, 1), ints("kv_lens", requests), v_head_dim, start)
    else:
        kv = SlotKV(k, v, ints("kv_lens", requests + 1), ints("indices", 1), v_head_dim, start)
    mask = None
    if request.mask is not None:
        if request.mask == "packed":
            data = make(1, max(1, -(-length // 64)), dtype=torch.int64)
        else:
            data = make(requests * length**2, dtype=torch.uint8)
        mask = TreeMask(data, request.mask, ints("mask_indptr", requests + 1) if request.mask_indptr else None)
    draft_kv = (make(1, heads, request.head_dim, dtype=dtype), make(1, heads, request.v_head_dim, dtype=dtype))
    scale: Any = {"none": 1.0, "host": 2.0, "device": make(1, dtype=torch.float32)}[request.scales]
    return resolve(
        make(1, request.heads, request.head_dim, dtype=dtype),
        kv,
        cu_seqlens_q=ints("cu_seqlens_q", requests + 1),
        max_query_len=length,
        draft_kv=draft_kv if request.draft == "dense" else None,
        draft_slots=ints("draft_slots", 1) if request.draft == "slots" else None,
        mask=mask,
        softcap=1.0 if request.softcap else 0.0,
        window=request.window,
        sinks=make(request.heads, dtype=torch.float32) if request.sinks else None,
        positions=ints("positions", 1) if request.positions else None,
        k_scale=scale,
        v_scale=1.0 if request.latent else scale,
        return_lse=request.return_lse,
    )
