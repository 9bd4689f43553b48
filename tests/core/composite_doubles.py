"""FlashAttention 3 and FlashMLA as doubles in torch, for the implementations that run them, on a CPU.

A double takes what the library takes and insists on what the library insists on. Where the library's result means nothing, it
gives NaN and infinities.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flashmap.core import registry
from flashmap.core.implementations.composite import Composite
from flashmap.core.implementations.probing import Found


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    """(out [L, H, Dv], lse [H, L]) in fp32 of q [L, H, Dk] on keys and values [n, Hkv, D]; ``hidden`` bool [L, n]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    logits = (torch.einsum("thd,nhd->htn", q.float(), keys) * scale).masked_fill(hidden, float("-inf"))
    return torch.einsum("htn,nhd->thd", logits.softmax(-1), values), logits.logsumexp(-1)


def fa3_double(
    q: Any, k: Any, v: Any, q_v: Any, out: Any, cu_seqlens_q: Any, seqused_q: Any, seqused_k: Any, max_seqlen_q: int,
    max_seqlen_k: int, page_table: Any, leftpad_k: Any, softmax_scale: float, is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """FlashAttention 3's forward pass. Without ``leftpad_k`` it multiplies whole pages, as its TMA path does."""
    tokens, heads, _ = q.shape
    requests, page = page_table.shape[0], k.shape[1]
    for ints in (cu_seqlens_q, seqused_q, seqused_k, page_table, leftpad_k):
        assert ints is None or (ints.dtype == torch.int32 and ints.stride(-1) == 1)
    assert cu_seqlens_q.shape == (requests + 1,) and seqused_k.shape == (requests,)
    assert leftpad_k is None or not leftpad_k.any()
    for tensor in (q, k, v, q_v, out):  # moved by 16 bytes at a time
        assert tensor is None or (tensor.data_ptr() % 16 == 0 and not any(s * tensor.element_size() % 16 for s in tensor.stride()[:-1]))
    if out is None:
        out = torch.full((tokens, heads, v.shape[-1]), float("nan"), dtype=q.dtype)
    lse = torch.full((heads, tokens), float("nan"))
    for r, (first, end) in enumerate(zip(cu_seqlens_q.tolist()[:-1], cu_seqlens_q.tolist()[1:], strict=True)):
        length, rows = int(seqused_k[r]), end - first if seqused_q is None else int(seqused_q[r])
        assert 0 <= length <= max_seqlen_k <= page_table.shape[1] * page and rows <= max_seqlen_q
        at = slice(first, first + rows)
        if rows == 0:
            continue
        if length == 0:
            out[at], lse[:, at] = float("nan"), float("inf")
            continue
        listed = page_table[r, : -(-length // page)].long()
        read = len(listed) * page if leftpad_k is None else length
        keys, values = (x[listed].flatten(0, 1)[:read] for x in (k, v))
        query = q[at]
        if q_v is not None:
            query, keys = torch.cat((query, q_v[at]), -1), torch.cat((keys, values), -1)
        t, n = torch.arange(rows)[:, None], torch.arange(read)[None, :]
        hidden = (n >= length) | ((n > t + length - rows) if is_causal else (t < 0))
        result, lse[:, at] = attention(query, keys, values, hidden, softmax_scale)
        out[at] = result.to(out.dtype)
    return out, lse


def flashmla_double(
    q: Any, kcache: Any, head_size_v: int, seqlens_k: Any, block_table: Any, softmax_scale: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashMLA's dense decoding. A page id that does not exist is as a page of zeros."""
    requests, length, heads, dim = q.shape
    assert kcache.shape[1:] == (64, 1, 576) and (dim, head_size_v) == (576, 512) and not is_causal
    assert seqlens_k.dtype == block_table.dtype == torch.int32 and seqlens_k.shape == (requests,)
    assert q.is_contiguous() and q.data_ptr() % 16 == 0 and seqlens_k.min() >= 1
    out, lse = torch.empty(requests, length, heads, 512, dtype=q.dtype), torch.empty(requests, heads, length)
    for r, n in enumerate(seqlens_k.tolist()):
        assert n <= block_table.shape[1] * 64
        pages = [int(p) for p in block_table[r, : -(-n // 64)]]
        keys = torch.cat([kcache[p] if 0 <= p < len(kcache) else torch.zeros_like(kcache[0]) for p in pages])[:n]
        result, lse[r] = attention(q[r], keys, keys[..., :512], torch.zeros(length, n, dtype=torch.bool), softmax_scale)
        out[r] = result.to(out.dtype)
    return out, lse


DOUBLES = {"fa3_tail": fa3_double, "fa3": fa3_double, "flashmla_tail": flashmla_double}


def doubled(name: str, attend: Any = None) -> Composite:
    """The implementation on this CPU with its library's double."""
    real = registry.get(name)
    assert isinstance(real, Composite)
    capability = replace(real.capability, devices=frozenset({"cpu"}), dtypes=None, kv_dtypes=None)
    found = Found(attend or DOUBLES[name])
    return replace(real, capability=capability, find=lambda device: found)
