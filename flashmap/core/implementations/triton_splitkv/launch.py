"""From a checked call to the two launches. What can be known of a request beforehand is in its cached :class:`Plan`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.runtime import driver

from flashmap.core.implementations.triton_splitkv import kernels
from flashmap.core.implementations.triton_splitkv.config import Config, config_for, overrides, request_block
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
    """The launches of one request: grids, compile-time constants, and ``partials``, the fp32 elements of scratch.

    Where nothing is merged one element is taken all the same: the kernel is compiled for a pointer to fp32.
    """

    config: Config
    target: int
    merges: bool
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
    scratch = scratch_of(call.q.device)
    parts = scratch.take(plan.partials, _stream(call.q.device), capturing=device.capturing)
    assert parts is not None, "select() asks not_ready() before a call under capture"
    if not device.capturing:
        scratch.reserve(plan.partials)
    _launch(call, plan, parts)


def not_ready(call: Call) -> tuple[Reason, ...]:
    """Scratch that a captured call lacks."""
    plan = _plan(call.request, replace(DeviceInfo.of(call.q.device), capturing=False))
    if scratch_of(call.q.device).holds(plan.partials, _stream(call.q.device)):
        return ()
    text = f"a graph is being captured and the stream has no scratch of {plan.partials * 4} bytes"
    return (Reason("scratch", text, "call prepare(), or the op once with the same shapes, before the capture"),)


def prepare(request: VerifyRequest, limits: Limits, device: torch.device) -> None:
    """Reserve scratch for the worst call within ``limits`` and compile by launching calls whose requests are all empty."""
    device, info = _indexed(device), replace(DeviceInfo.of(device), capturing=False)
    worst = replace(request, num_requests=limits.max_requests, max_kv_len=None)
    sizes = [_plan(replace(worst, max_query_len=length), info).partials for length in range(1, limits.max_query_len + 1)]
    scratch_of(device).reserve(max(sizes))
    nothing = torch.empty(1, dtype=torch.float32, device=device)
    compiled = set()
    for requests in range(1, limits.max_requests + 1):
        some = replace(request, num_requests=requests, max_kv_len=None if request.max_kv_len is None else limits.max_kv_len)
        plan = _plan(some, info)
        kernels_of = (*plan.constants.values(), plan.merges)
        if kernels_of not in compiled:
            compiled.add(kernels_of)
            _launch(_empty_call(some, device), plan, nothing)


def _indexed(device: torch.device) -> torch.device:
    """The device as tensors name it: "cuda" is "cuda:0" or whichever is current."""
    return torch.empty(0, device=device).device


def _stream(device: torch.device) -> int:
    return int(driver.active.get_current_stream(device.index)) if device.type == "cuda" else 0


@functools.lru_cache(maxsize=4096)
def _plan(request: VerifyRequest, device: DeviceInfo) -> Plan:
    forced = overrides()
    config = config_for(request, device, forced)
    if config is None:  # why_not() declines what fits by no means
        named = ", ".join(f"FLASHMAP_SPLITKV_{name.upper()}={value}" for name, value in forced.items())
        raise ValueError(f"{named} needs more than the {device.shared_memory >> 10} KiB of shared memory: set a lower value, or unset it")
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
        K_SCALE_ON_DEVICE=request.scales in ("device", "device_k"),
        V_SCALE_ON_DEVICE=request.scales in ("device", "device_v"),
        FP16=config.fp16,
        PRECISION="ieee" if request.dtype == "fp32" else "tf32",  # of fp32 dots alone
        num_warps=config.warps,
        num_stages=config.stages,
    )
    pdl = {"launch_pdl": True} if config.pdl else {}  # an option that older versions of Triton do not know
    return Plan(
        config=config,
        target=config.target(request.kv_heads, device.sm_count),
        merges=merges,
        partials=partials * (request.v_head_dim + 1) if merges else 1,
        lse_at=partials * request.v_head_dim,
        grid=(request.kv_heads * config.row_blocks, launched),
        constants=constants,
        merge_grid=(request.kv_heads * rows, request.num_requests),
        merge_constants=dict(shared, BLOCK_S=config.block_s, num_warps=config.merge_warps, **pdl),
    )


def _launch(call: Call, plan: Plan, parts: torch.Tensor) -> None:
    q, out, kv, config = call.q, call.out, call.kv, plan.config
    unused = q  # stands for tensors that the constants say are not read
    lens, table = (kv.kv_lens, kv.block_table) if isinstance(kv, PagedKV) else (kv.indptr, kv.indices)
    v = kv.k if kv.v is None else kv.v
    lse = out if call.lse is None else call.lse
    draft_k = unused if call.draft_k is None else call.draft_k
    draft_v = draft_k if call.draft_v is None else call.draft_v
    kv_start = _or(kv.kv_start, unused)
    sinks = _or(call.sinks, unused)
    mask, mask_indptr, mask_row = _mask_arguments(call.mask, unused)
    k_scale, k_scale_ptr = _scale_arguments(call.k_scale, unused)
    v_scale, v_scale_ptr = _scale_arguments(call.k_scale if call.request.latent else call.v_scale, unused)
    counts = (call.request.num_requests, call.request.max_kv_len or 0)
    sharing = (call.window or 0, plan.target, config.min_tiles, config.max_splits)
    _split_kernel(config.kernel)[plan.grid](
        q, kv.k, v, out, lse, parts, plan.lse_at,
        call.cu_seqlens_q, lens, table, kv_start,
        draft_k, draft_v, _or(call.draft_slots, unused), mask, mask_indptr, _or(call.positions, unused), sinks,
        k_scale_ptr, v_scale_ptr,
        *counts, call.scale, k_scale, v_scale, call.softcap, *sharing,
        *q.stride()[:2], *_cache_strides(kv.k), *_cache_strides(v), *out.stride()[:2],
        table.stride()[0], *draft_k.stride()[:2], *draft_v.stride()[:2], mask_row,
        **plan.constants,
    )  # fmt: skip
    if plan.merges:
        kernels.merge_kernel[plan.merge_grid](
            out, lse, parts, plan.lse_at, call.cu_seqlens_q, lens, kv_start, sinks,
            *counts, *sharing, *out.stride()[:2], **plan.merge_constants,
        )  # fmt: skip


def _split_kernel(name: str) -> Any:
    if name == "split":
        return kernels.split_kernel
    from flashmap.core.implementations.triton_splitkv.latent_sm90 import latent_kernel

    return latent_kernel


def _cache_strides(cache: torch.Tensor) -> tuple[int, int, int]:
    """Of a page, a token and a head. A slot is a page of one token."""
    strides = cache.stride()
    return strides[:3] if len(strides) == 4 else (strides[0], 0, strides[1])


def _mask_arguments(mask: TreeMask | None, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(bytes or words, indptr, words in a row)."""
    if mask is None:
        return unused, unused, 0
    data = mask.data.view(torch.uint8) if mask.data.dtype == torch.bool else mask.data
    return data, _or(mask.indptr, unused), data.stride()[0]


def _scale_arguments(scale: float | torch.Tensor, unused: torch.Tensor) -> tuple[float, torch.Tensor]:
    """(factor, pointer): the value is their product where the scale is on the device, else the factor."""
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
    k = make(*rows, heads, request.head_dim + (not request.aligned), dtype=kv_dtype)[..., : request.head_dim]
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
    number, tensor = 1.0 if request.scales == "none" else 2.0, make(1, dtype=torch.float32)
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
        sinks=make(request.heads, dtype=dtype) if request.sinks else None,
        positions=ints("positions", 1) if request.positions else None,
        k_scale=tensor if request.scales in ("device", "device_k") else number,
        v_scale=1.0 if request.latent else tensor if request.scales in ("device", "device_v") else number,
        return_lse=request.return_lse,
    )
