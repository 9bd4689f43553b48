"""From a checked call to the two launches. What can be known of a request beforehand is in its cached :class:`Plan`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmap.core.implementations.triton_shared import scratch
from flashmap.core.implementations.triton_shared.arguments import (
    cache_strides,
    empty_call,
    indexed,
    mask_arguments,
    or_unused,
    planned_for,
)
from flashmap.core.implementations.triton_splitkv import kernels
from flashmap.core.implementations.triton_splitkv.config import Config, config_for, overrides, request_block
from flashmap.core.inputs import Call, PagedKV
from flashmap.core.interface import Reason
from flashmap.core.request import DeviceInfo, Limits, VerifyRequest


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
    plan = _plan_of(call)
    _launch(call, plan, scratch.take(call, plan.partials))


def not_ready(call: Call) -> tuple[Reason, ...]:
    return scratch.lacking(call, _plan_of(call).partials)


def prepare(request: VerifyRequest, limits: Limits, device: torch.device) -> None:
    """Reserve scratch for the worst call within ``limits`` and compile by launching calls whose requests are all empty."""
    device, info = indexed(device), planned_for(device)
    worst = replace(request, num_requests=limits.max_requests, max_kv_len=None)
    sizes = [_plan(replace(worst, max_query_len=length), info).partials for length in range(1, limits.max_query_len + 1)]
    scratch.scratch_of(device).reserve(max(sizes))
    nothing = torch.empty(1, dtype=torch.float32, device=device)
    compiled = set()
    for requests in range(1, limits.max_requests + 1):
        some = replace(request, num_requests=requests, max_kv_len=None if request.max_kv_len is None else limits.max_kv_len)
        plan = _plan(some, info)
        kernels_of = (*plan.constants.values(), *(plan.merge_constants.values() if plan.merges else ()))
        if kernels_of not in compiled:
            compiled.add(kernels_of)
            _launch(empty_call(some, device), plan, nothing)


def _plan_of(call: Call) -> Plan:
    return _plan(call.request, planned_for(call.q.device))


@functools.lru_cache(maxsize=4096)
def _plan(request: VerifyRequest, device: DeviceInfo) -> Plan:
    forced = overrides()
    config = config_for(request, device, forced)
    if config is None:  # why_not() declines what fits by no means
        named = ", ".join(f"FLASHMAP_SPLITKV_{name.upper()}={value}" for name, value in forced.items())
        raise ValueError(f"{named} needs more than the {device.shared_memory >> 10} KiB of shared memory: set a lower value, or unset it")
    rows = request.group * request.max_query_len
    launched = config.launched_splits(request, device.sm_count)
    splits = launched > request.num_requests and config.max_splits > 1
    arrivals = request.num_requests * request.kv_heads * config.row_blocks
    last_merges = splits and config.last_merges and arrivals <= scratch.COUNTERS
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
        PAIRS=config.pairs,
        LAST_MERGES=last_merges,
        PRECISION="ieee" if request.dtype == "fp32" else "tf32",  # of fp32 dots alone
        num_warps=config.warps,
        num_stages=config.stages,
    )
    pdl = {"launch_pdl": True} if config.pdl else {}  # an option that older versions of Triton do not know
    if config.registers is not None:
        constants["maxnreg"] = config.registers
    return Plan(
        config=config,
        target=config.target(request.kv_heads, device.sm_count),
        merges=splits and not last_merges,
        partials=partials * (request.v_head_dim + 1) if splits else 1,
        lse_at=partials * request.v_head_dim,
        grid=(request.kv_heads * config.row_blocks, launched),
        constants=constants,
        merge_grid=(request.kv_heads * -(-rows // config.merged), request.num_requests),
        merge_constants=dict(shared, MERGED=config.merged, BLOCK_S=config.block_s, num_warps=config.merge_warps, **pdl),
    )


def _launch(call: Call, plan: Plan, parts: torch.Tensor) -> None:
    q, out, kv, config = call.q, call.out, call.kv, plan.config
    unused = q  # stands for tensors that the constants say are not read
    lens, table = (kv.kv_lens, kv.block_table) if isinstance(kv, PagedKV) else (kv.indptr, kv.indices)
    v = kv.k if kv.v is None else kv.v
    lse = out if call.lse is None else call.lse
    draft_k = unused if call.draft_k is None else call.draft_k
    draft_v = draft_k if call.draft_v is None else call.draft_v
    kv_start = or_unused(kv.kv_start, unused)
    sinks = or_unused(call.sinks, unused)
    mask, mask_indptr, mask_row = mask_arguments(call.mask, unused)
    k_scale, k_scale_ptr = _scale_arguments(call.k_scale, unused)
    v_scale, v_scale_ptr = _scale_arguments(call.k_scale if call.request.latent else call.v_scale, unused)
    counts = (call.request.num_requests, call.request.max_kv_len or 0)
    sharing = (call.window or 0, plan.target, config.min_tiles, config.max_splits)
    _split_kernel(config.kernel, call.request.aligned)[plan.grid](
        q, kv.k, v, out, lse, parts, plan.lse_at,
        call.cu_seqlens_q, lens, table, kv_start,
        draft_k, draft_v, or_unused(call.draft_slots, unused), mask, mask_indptr, or_unused(call.positions, unused), sinks,
        k_scale_ptr, v_scale_ptr,
        *counts, call.scale, k_scale, v_scale, call.softcap, *sharing,
        *q.stride()[:2], *cache_strides(kv.k), *cache_strides(v), *out.stride()[:2],
        table.stride()[0], *draft_k.stride()[:2], *draft_v.stride()[:2], mask_row,
        **plan.constants,
    )  # fmt: skip
    if plan.merges:
        kernels.merge_kernel[plan.merge_grid](
            out, lse, parts, plan.lse_at, call.cu_seqlens_q, lens, kv_start, sinks,
            *counts, *sharing, *out.stride()[:2], **plan.merge_constants,
        )  # fmt: skip


def _split_kernel(name: str, aligned: bool) -> Any:
    if name == "split":
        return kernels.split_kernel if aligned else kernels.split_kernel_of_any_alignment
    from flashmap.core.implementations.triton_splitkv.latent_sm90 import latent_kernel

    return latent_kernel


def _scale_arguments(scale: float | torch.Tensor, unused: torch.Tensor) -> tuple[float, torch.Tensor]:
    """(factor, pointer): the value is their product where the scale is on the device, else the factor."""
    return (1.0, scale) if isinstance(scale, torch.Tensor) else (float(scale), unused)
