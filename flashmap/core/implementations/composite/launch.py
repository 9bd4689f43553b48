"""From a checked call to the launches: a small kernel, the library, a small kernel. What a request fixes is in its cached :class:`Plan`.

``fa3_tail`` and ``flashmla_tail``: lengths (and FlashMLA's query rows, padded to one length), the library over the prefixes, the
draft tokens with the merge. ``fa3``: lengths with the requests that have fewer keys than query tokens, the library over the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmap import env
from flashmap.core.implementations.composite import kernels
from flashmap.core.implementations.probing import Attend
from flashmap.core.implementations.triton_shared import scratch
from flashmap.core.implementations.triton_shared.arguments import (
    cache_strides,
    empty_call,
    indexed,
    mask_arguments,
    or_unused,
    planned_for,
)
from flashmap.core.implementations.triton_shared.shapes import head_split, power_of_two
from flashmap.core.inputs import Call, PagedKV
from flashmap.core.interface import Reason
from flashmap.core.request import DeviceInfo, Limits, VerifyRequest

_ROWS = 16  # of a program of the tail: the fewest that a product takes, so that the most programs share a short piece of work
_WARPS = 4
_LENGTHS_BLOCK = 256
_HEADS_BLOCK = 16  # heads that a program copies, 18 kB of latent queries
_PLANNED_TOGETHER = 31  # FlashAttention 3 plans 31 requests a warp, and has a kernel for each number of warps


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches of one request. ``requests``: int32 entries that an array over requests takes in scratch, which keeps the
    next one aligned; ``packed``: elements of padded query rows; ``scratch``: fp32 elements of all; ``pdl``: a tail that merges may
    start before the library ends; ``whole_pages``: the library may copy rows of a page that are not listed."""

    grid: tuple[int, int]
    constants: dict[str, Any]
    pdl: bool
    requests: int
    packed: int
    scratch: int
    whole_pages: bool


def run(call: Call, name: str, attend: Attend) -> None:
    if name == "fa3" and not _aligned(call.out):
        name = "fa3_tail"  # which writes out itself
    plan = _plan_of(call, name)
    _RUN[name](call, plan, scratch.take(call, plan.scratch), attend)


def not_ready(call: Call, name: str) -> tuple[Reason, ...]:
    return scratch.lacking(call, _plan_of(call, name).scratch)


def prepare(request: VerifyRequest, limits: Limits, device: torch.device, name: str, attend: Attend) -> None:
    """Reserve scratch for the worst call within ``limits``; compile, and let the library load its kernels, by calls that are empty."""
    device, info = indexed(device), planned_for(device)
    longest = replace(request, num_requests=limits.max_requests, max_query_len=max(limits.max_query_len, request.max_query_len))
    scratch.scratch_of(device).reserve(_plan(longest, info, name).scratch)
    pages = -(-limits.max_kv_len // request.page_size)  # the library's choice of kernels depends on the width of the table
    for requests in (*range(1, limits.max_requests, _PLANNED_TOGETHER), limits.max_requests):
        run(empty_call(replace(request, num_requests=requests), device, pages=pages), name, attend)


def _plan_of(call: Call, name: str) -> Plan:
    return _plan(call.request, planned_for(call.q.device), name)


@functools.lru_cache(maxsize=4096)
def _plan(request: VerifyRequest, device: DeviceInfo, name: str) -> Plan:
    length, heads = request.max_query_len, request.heads
    row_blocks = -(-request.group * length // _ROWS)
    span, d1, d2, dv = head_split(request)
    requests = -(-(request.num_requests + 1) // 4) * 4
    packed = request.num_requests * length * heads * request.head_dim if name == "flashmla_tail" else 0
    itemsize = 4 if request.dtype == "fp32" else 2
    return Plan(
        grid=(request.kv_heads * row_blocks, request.num_requests),
        constants=dict(
            HKV=request.kv_heads,
            G=request.group,
            DK=request.head_dim,
            DV=request.v_head_dim,
            ROW_BLOCKS=row_blocks,
            M=_ROWS,
            BLOCK_L=min(64, max(16, power_of_two(length))),
            SPAN=span,
            D1=d1,
            D2=d2,
            BLOCK_DV=dv,
            PAGE_SIZE=request.page_size,
            LATENT=request.latent,
            DRAFT=request.draft,
            MASK=request.mask or "none",
            MASK_INDPTR=request.mask_indptr,
            MASK_STRIDE=length if request.mask == "qlen" else 0,
            KV_START=request.kv_start,
            SINKS=request.sinks,
            LSE=request.return_lse,
            PADDED=name == "flashmla_tail",
            SHORT=name == "fa3",
            PRECISION="ieee" if request.dtype == "fp32" else "tf32",  # of fp32 dots alone
            num_warps=_WARPS,
        ),
        pdl=device.type == "cuda" and device.has_triton(3, 6),
        requests=requests,
        packed=packed,
        scratch=4 * requests + -(-packed * itemsize // 4),
        whole_pages=env.get("FLASHMAP_FA3_FINITE_PAGES"),
    )


def _fa3_tail(call: Call, plan: Plan, memory: torch.Tensor, attend: Attend) -> None:
    request, kv = call.request, _paged(call)
    keys, starts, pad, _ = _arrays(plan, memory, request.num_requests)
    kernels.lengths_kernel[(-(-(request.num_requests + 1) // _LENGTHS_BLOCK),)](
        call.cu_seqlens_q, kv.kv_lens, keys, starts, pad, request.num_requests, kv.max_kv_len, request.draft, _LENGTHS_BLOCK
    )
    if not _has_keys(kv):
        _tail(call, plan)
        return
    where = call.out if _aligned(call.out) else None
    out, lse = attend(**_fa3_arguments(call, plan, starts, keys, pad), out=where, seqused_q=None, is_causal=False)
    _tail(call, plan, _Part(out, (0, *out.stride()[:2]), lse, (0, lse.stride()[1], lse.stride()[0])))


def _fa3(call: Call, plan: Plan, memory: torch.Tensor, attend: Attend) -> None:
    keys, starts, pad, used = _arrays(plan, memory, call.request.num_requests)
    _tail(call, plan, arrays=(used, keys, starts, pad))
    if _has_keys(_paged(call)):
        attend(**_fa3_arguments(call, plan, starts, keys, pad), out=call.out, seqused_q=used, is_causal=True)


def _flashmla_tail(call: Call, plan: Plan, memory: torch.Tensor, attend: Attend) -> None:
    request, kv = call.request, _paged(call)
    if not _has_keys(kv):
        _tail(call, plan)
        return
    n, length, heads = request.num_requests, request.max_query_len, request.heads
    keys = memory.view(torch.int32)[:n]
    q = memory[4 * plan.requests :].view(call.q.dtype)[: plan.packed].view(n, length, heads, request.head_dim)
    span, rest = request.v_head_dim, request.head_dim - request.v_head_dim
    kernels.pack_kernel[(n, length, -(-heads // _HEADS_BLOCK))](
        call.q, q, call.cu_seqlens_q, kv.kv_lens, keys, n, kv.max_kv_len, *call.q.stride()[:2],
        heads, length, span, rest, request.draft, _HEADS_BLOCK,
    )  # fmt: skip
    q, scale = _positive(q, call.scale)
    out, lse = attend(q=q, kcache=kv.k, head_size_v=span, seqlens_k=keys, block_table=kv.block_table, softmax_scale=scale, is_causal=False)
    _tail(call, plan, _Part(out, out.stride()[:3], lse, (lse.stride()[0], lse.stride()[2], lse.stride()[1])))


_RUN: dict[str, Callable[[Call, Plan, torch.Tensor, Attend], None]] = {
    "fa3_tail": _fa3_tail,
    "fa3": _fa3,
    "flashmla_tail": _flashmla_tail,
}


def _fa3_arguments(call: Call, plan: Plan, starts: torch.Tensor, keys: torch.Tensor, pad: torch.Tensor) -> dict[str, Any]:
    """What both calls of FlashAttention 3 share. A latent cache's columns for the position are its K, the latent its V.

    With ``leftpad_k`` (of zeros) it copies the listed rows of a page one by one. Without, it may copy pages of 64 and more whole,
    which is faster where rows are many, and a NaN in a row that is not listed then gets into the result: 0 * NaN in the product
    with V.
    """
    kv = _paged(call)
    q, scale = _positive(call.q if _aligned(call.q) else call.q.contiguous(), call.scale)
    q_v, k, v = None, kv.k, kv.v
    if v is None:
        dv = call.request.v_head_dim
        q, q_v, k, v = q[..., dv:], q[..., :dv], k[..., dv:], k[..., :dv]
    return dict(
        q=q,
        k=k,
        v=v,
        q_v=q_v,
        cu_seqlens_q=starts,
        seqused_k=keys,
        max_seqlen_q=call.max_query_len,
        max_seqlen_k=kv.max_kv_len,
        page_table=kv.block_table,
        leftpad_k=None if plan.whole_pages else pad,
        softmax_scale=scale,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A library's result over the prefixes. Strides are those of a request (0: tokens are numbered through), a token and a head."""

    out: torch.Tensor
    out_strides: tuple[int, ...]
    lse: torch.Tensor
    lse_strides: tuple[int, ...]


def _tail(call: Call, plan: Plan, part: _Part | None = None, arrays: tuple[torch.Tensor, ...] | None = None) -> None:
    """Launch the tail. ``part``: what it merges; ``arrays``: where it leaves the lengths for a library that comes after it."""
    q, out, kv = call.q, call.out, _paged(call)
    unused = q  # stands for tensors that the constants say are not read
    v = kv.k if kv.v is None else kv.v
    draft_k = or_unused(call.draft_k, unused)
    draft_v = or_unused(call.draft_v, draft_k)
    mask, mask_indptr, mask_row = mask_arguments(call.mask, unused)
    # Without a library before it, what it reads could be the work of the kernel that it would overtake.
    pdl = plan.pdl and part is not None
    option = {"launch_pdl": True} if pdl else {}  # which older versions of Triton do not know
    part = part or _Part(unused, (0, 0, 0), unused, (0, 0, 0))
    kernels.tail_kernel[plan.grid](
        q, kv.k, v, out, or_unused(call.lse, unused), part.out, part.lse, *(arrays or (unused,) * 4),
        call.cu_seqlens_q, kv.kv_lens, kv.block_table, or_unused(kv.kv_start, unused),
        draft_k, draft_v, or_unused(call.draft_slots, unused), mask, mask_indptr, or_unused(call.sinks, unused),
        call.request.num_requests, kv.max_kv_len, call.scale,
        *q.stride()[:2], *cache_strides(kv.k), *cache_strides(v), *out.stride()[:2], *part.out_strides, *part.lse_strides,
        kv.block_table.stride()[0], *draft_k.stride()[:2], *draft_v.stride()[:2], mask_row,
        PREFIX=part.out is not unused,
        PDL=pdl,
        **plan.constants,
        **option,
    )  # fmt: skip


def _arrays(plan: Plan, memory: torch.Tensor, requests: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """int32 in scratch: keys [R], starts [R + 1], padding [R], query tokens [R]."""
    ints, step = memory.view(torch.int32), plan.requests
    return (
        ints[:requests],
        ints[step : step + requests + 1],
        ints[2 * step : 2 * step + requests],
        ints[3 * step : 3 * step + requests],
    )


def _paged(call: Call) -> PagedKV:
    assert isinstance(call.kv, PagedKV)  # why_not() declines slot lists
    return call.kv


def _has_keys(kv: PagedKV) -> bool:
    """Whether there is room for a key at all: libraries need not accept a cache or a table without."""
    return kv.max_kv_len > 0 and kv.k.shape[0] > 0


def _positive(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Queries and a scale above 0 that give the same logits: libraries take the largest logit before they scale it."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


def _aligned(tensor: torch.Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes, which is what the libraries move at once."""
    size = tensor.element_size()
    return tensor.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in tensor.stride()[:-1])
