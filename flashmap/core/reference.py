"""The specification: the op as a loop over requests in fp32, written to be read.

Every sentence of the op's semantics is a line here. A kernel that disagrees is wrong until this file changes, in a
commit of its own. It reads device values on the host, so it declines under graph capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashmap.core.inputs import Call, PagedKV, TreeMask
from flashmap.core.interface import Implementation


class Reference(Implementation):
    """Any device, every feature, no speed. Memory: one request's keys in fp32."""

    @torch.no_grad()
    def run(self, call: Call) -> None:
        for request in requests_of(call):
            out, lse = attend(call, request)
            call.out[request.rows] = out.to(call.out.dtype)
            if call.lse is not None:
                call.lse[request.rows] = lse


IMPLEMENTATION = Reference("reference")


@dataclass(frozen=True, slots=True)
class Request:
    """One request that asks something: its L rows of q, and its keys, the prefix before the L draft tokens."""

    rows: slice
    keys: torch.Tensor  # fp32 [prefix + L, Hkv, Dk]
    values: torch.Tensor  # fp32 [prefix + L, Hkv, Dv]
    visible: torch.Tensor  # bool [L, prefix + L]


def requests_of(call: Call) -> Iterator[Request]:
    """The requests of a call, gathered and with what each of their rows sees. A request without rows is not looked at."""
    starts = call.cu_seqlens_q.tolist()
    bounds = list(zip(starts[:-1], starts[1:], strict=True))
    for r, (first, end) in enumerate(bounds):
        if end - first > call.max_query_len:
            raise ValueError(f"request {r} has {end - first} query tokens, more than max_query_len {call.max_query_len}")
    mask_start = 0  # where the next block of a full mask without indptr begins
    for r, (first, end) in enumerate(bounds):
        if end > first:
            at = _place(call, r, first, end)
            keys, values, exists = _read(call, at)
            yield Request(slice(first, end), keys, values, _visible(call, at, exists, mask_start))
            mask_start += at.rows * (at.kv_start + at.prefix + at.rows)


def attend(call: Call, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """(out fp32 [L, Hq, Dv], lse fp32 [L, Hq]) of one request."""
    group, rows = call.request.group, request.visible.shape[0]
    q = call.q[request.rows].float()
    keys = request.keys.repeat_interleave(group, dim=1)
    values = request.values.repeat_interleave(group, dim=1)
    logits = torch.einsum("thd,nhd->htn", q, keys) * call.scale
    if call.softcap:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    logits = logits.masked_fill(~request.visible, float("-inf"))
    if call.sinks is not None:  # one more logit in the denominator, neither capped nor masked
        sinks = call.sinks.float()[:, None, None].expand(-1, rows, 1)
        logits = torch.cat((logits, sinks), dim=-1)
        values = torch.cat((values, values.new_zeros(1, *values.shape[1:])))
    lse = torch.logsumexp(logits, dim=-1)  # -inf for a row that sees nothing
    weights = torch.exp(logits - lse.masked_fill(lse.isinf(), 0.0)[..., None])  # which then are all 0
    return torch.einsum("htn,nhd->thd", weights, values), lse.T


@dataclass(frozen=True, slots=True)
class _Place:
    """Where request ``index`` is: ``rows`` rows of q from ``first`` on; ``length`` tokens in the cache, ``prefix`` of them its prefix."""

    index: int
    first: int
    rows: int
    length: int
    prefix: int
    kv_start: int


def _place(call: Call, r: int, first: int, end: int) -> _Place:
    kv, rows = call.kv, end - first
    # A length past the table's width is clamped to it.
    length = min(int(kv.kv_lens[r]), kv.max_kv_len) if isinstance(kv, PagedKV) else int(kv.indptr[r + 1]) - int(kv.indptr[r])
    # With draft_kv or draft_slots the cache lists the prefix alone; else its last tokens are the draft tokens. A length
    # below L (graphs are captured with length 1) leaves no prefix.
    in_cache = call.draft_k is None and call.draft_slots is None
    prefix = max(length - rows, 0) if in_cache else length
    return _Place(r, first, rows, length, prefix, 0 if kv.kv_start is None else int(kv.kv_start[r]))


def _read(call: Call, at: _Place) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(keys, values, exists): the prefix and the draft tokens, dequantised, and bool [L]: the draft token has K and V."""
    kv, end = call.kv, at.first + at.rows
    if isinstance(kv, PagedKV):
        listed = torch.arange(at.length, device=kv.k.device)
        slots = kv.block_table[at.index].long()[listed // kv.page_size] * kv.page_size + listed % kv.page_size
    else:
        start = int(kv.indptr[at.index])
        slots = kv.indices[start : start + at.length].long()

    exists = torch.ones(at.rows, dtype=torch.bool, device=call.q.device)
    if call.draft_slots is not None:
        slots = torch.cat((slots, call.draft_slots[at.first : end].long()))
    keys, values = _load(call, slots)
    if call.draft_k is not None:  # draft K/V are not quantised, so no scale applies
        draft_k = call.draft_k[at.first : end].float()
        draft_v = draft_k[..., : values.shape[-1]] if call.draft_v is None else call.draft_v[at.first : end].float()
        keys, values = torch.cat((keys, draft_k)), torch.cat((values, draft_v))
    missing = at.prefix + at.rows - keys.shape[0]  # in a cache shorter than L draft token j exists only if j < its length
    if missing:  # the others get zeros, which nobody sees
        keys = torch.cat((keys, keys.new_zeros(missing, *keys.shape[1:])))
        values = torch.cat((values, values.new_zeros(missing, *values.shape[1:])))
        exists[at.rows - missing :] = False
    return keys, values, exists


def _load(call: Call, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of token slots in fp32: [n, Hkv, Dk], [n, Hkv, Dv]. A latent cache's V is the first columns of its K."""
    kv = call.kv
    if isinstance(kv, PagedKV):
        page, row = slots // kv.page_size, slots % kv.page_size
        keys = _rows(kv.k, page, row)
        values = None if kv.v is None else _rows(kv.v, page, row)
    else:
        keys = _rows(kv.k, slots)
        values = None if kv.v is None else _rows(kv.v, slots)
    keys = keys.float() * _factor(call.k_scale)
    if values is None:
        return keys, keys[..., : call.kv.v_head_dim]
    return keys, values.float() * _factor(call.v_scale)


def _factor(scale: float | torch.Tensor) -> float | torch.Tensor:
    """A scale as something that changes neither the dtype nor the shape of what it multiplies."""
    return scale.view(()) if isinstance(scale, torch.Tensor) else scale


def _rows(cache: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
    """``cache[index]``; torch gathers no fp8, so its bytes are gathered."""
    if cache.dtype.itemsize == 1:
        gathered: torch.Tensor = cache.view(torch.uint8)[index]
        return gathered.view(cache.dtype)
    return cache[index]


def _visible(call: Call, at: _Place, exists: torch.Tensor, mask_start: int) -> torch.Tensor:
    """bool [L, prefix + L]: which keys each query token sees."""
    rows, prefix, device = at.rows, at.prefix, call.q.device
    visible = torch.ones(rows, prefix + rows, dtype=torch.bool, device=device)  # the whole prefix
    visible[:, prefix:] = _visible_drafts(call, at, mask_start) & exists
    if call.window is not None:
        queries_at = at.kv_start + prefix + torch.arange(rows, device=device)
        if call.positions is not None:
            queries_at = call.positions[at.first : at.first + rows].long()
        prefix_at = at.kv_start + torch.arange(prefix, device=device)
        keys_at = torch.cat((prefix_at, queries_at))  # a draft key is at its own query's position
        visible &= queries_at[:, None] - keys_at[None, :] <= call.window
    return visible


def _visible_drafts(call: Call, at: _Place, mask_start: int) -> torch.Tensor:
    """bool [L, L]: which draft tokens (columns) each query token sees, by the mask alone."""
    rows, mask = at.rows, call.mask
    if mask is None:  # token t sees draft tokens j <= t
        return torch.ones(rows, rows, dtype=torch.bool, device=call.q.device).tril()
    if mask.layout == "packed":  # bit j % 64 of word j // 64
        words = mask.data[at.first : at.first + rows]
        j = torch.arange(rows, device=words.device)
        return (words[:, j // 64] >> (j % 64) & 1).bool()
    start, width, skip = _block(call, mask, at, mask_start)
    t = torch.arange(rows, device=mask.data.device)
    entries = start + t[:, None] * width + skip + t[None, :]
    return mask.data.reshape(-1)[entries] != 0


def _block(call: Call, mask: TreeMask, at: _Place, mask_start: int) -> tuple[int, int, int]:
    """(first entry, row width, entries of a row to skip) of the request's block of mask bytes."""
    indptr = None if mask.indptr is None else int(mask.indptr[at.index])
    if mask.layout == "full":  # rows of kv_start + prefix + L entries; those before the last L are never read
        before = at.kv_start + at.prefix
        return (mask_start if indptr is None else indptr), before + at.rows, before
    if indptr is not None:
        return indptr, at.rows, 0
    return at.index * call.max_query_len**2, call.max_query_len, 0
