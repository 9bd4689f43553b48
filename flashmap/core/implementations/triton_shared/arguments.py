"""What the Triton implementations share on the host: a call's tensors as kernel arguments, and calls to compile with."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from triton.runtime import driver

from flashmap.core.inputs import Call, KVCache, PagedKV, SlotKV, TreeMask, resolve
from flashmap.core.request import DeviceInfo, VerifyRequest

_TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def cache_strides(cache: torch.Tensor) -> tuple[int, int, int]:
    """Of a page, a token and a head. A slot is a page of one token."""
    strides = cache.stride()
    return strides[:3] if len(strides) == 4 else (strides[0], 0, strides[1])


def mask_arguments(mask: TreeMask | None, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(bytes or words, indptr, words in a row)."""
    if mask is None:
        return unused, unused, 0
    data = mask.data.view(torch.uint8) if mask.data.dtype == torch.bool else mask.data
    return data, or_unused(mask.indptr, unused), data.stride()[0]


def or_unused(tensor: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    return unused if tensor is None else tensor


def planned_for(device: torch.device) -> DeviceInfo:
    """What a plan for ``device`` depends on: the same whether or not a graph is being captured."""
    info = DeviceInfo.of(device)
    return replace(info, capturing=False) if info.capturing else info


def indexed(device: torch.device) -> torch.device:
    """The device as tensors name it: "cuda" is "cuda:0" or whichever is current."""
    return torch.empty(0, device=device).device


def current_stream(device: torch.device) -> int:
    return int(driver.active.get_current_stream(device.index)) if device.type == "cuda" else 0


def empty_call(request: VerifyRequest, device: torch.device, *, pages: int = 1) -> Call:
    """A call of this static shape in which every request is empty: it launches the kernels and writes nothing.

    ``pages``: the width of a paged cache's block table.
    """
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
        kv = PagedKV(k, v, ints("indices", 1, pages).expand(requests, pages), ints("kv_lens", requests), v_head_dim, start)
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
