"""The specification: the op as a loop over requests in fp32, written to be read.

Every sentence of the op's semantics is a line here. A kernel that disagrees is wrong until this file changes, in a
commit of its own. It reads device values on the host, so it declines under graph capture.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashmap.core.inputs import Call, PagedKV, TreeMask
from flashmap.core.interface import Implementation


class Reference(Implementation):
    """Any device, every feature, no speed. Memory: one request's keys in fp32."""

    def run(self, call: Call) -> None:
        starts = call.cu_seqlens_q.tolist()
        mask_start = 0  # where the next block of a full mask without indptr begins
        for r, (first, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            request = _read(call, r, first, end)
            if end > first:
                rows = slice(first, end)
                out, lse = _attend(call, request, _visible_drafts(call, request, mask_start))
                call.out[rows] = out.to(call.out.dtype)
                if call.lse is not None:
                    call.lse[rows] = lse
            mask_start += request.rows * (request.kv_start + request.prefix + request.rows)


IMPLEMENTATION = Reference("reference")


@dataclass(frozen=True, slots=True)
class _Request:
    """One request: rows ``first`` to ``first + rows`` of q; its keys, of which the first ``prefix`` are the prefix."""

    index: int
    first: int
    rows: int
    prefix: int
    kv_start: int
    keys: torch.Tensor  # fp32 [prefix + rows, Hkv, Dk]
    values: torch.Tensor  # fp32 [prefix + rows, Hkv, Dv]
    exists: torch.Tensor  # bool [rows]: the draft token has K and V


def _read(call: Call, r: int, first: int, end: int) -> _Request:
    """Gather request r's prefix and draft tokens, dequantised."""
    rows, kv = end - first, call.kv
    if rows > call.max_query_len:
        raise ValueError(f"request {r} has {rows} query tokens, more than max_query_len {call.max_query_len}")
    if isinstance(kv, PagedKV):
        length = min(int(kv.kv_lens[r]), kv.max_kv_len)  # a length past the table's width is clamped to it
        listed = torch.arange(length, device=kv.k.device)
        slots = kv.block_table[r].long()[listed // kv.page_size] * kv.page_size + listed % kv.page_size
    else:
        slots = kv.indices[int(kv.indptr[r]) : int(kv.indptr[r + 1])].long()
        length = slots.numel()

    # With draft_kv or draft_slots the cache lists the prefix alone; else its last tokens are the draft tokens. A length
    # below L (graphs are captured with length 1) leaves no prefix, and only the draft tokens below it exist.
    in_cache = call.draft_k is None and call.draft_slots is None
    prefix = max(length - rows, 0) if in_cache else length
    exists = torch.arange(rows, device=call.q.device) + prefix < length if in_cache else torch.ones(rows, dtype=torch.bool, device=call.q.device)
    if call.draft_slots is not None:
        slots = torch.cat((slots, call.draft_slots[first:end].long()))
    keys, values = _load(call, slots)
    if call.draft_k is not None:  # draft K/V are not quantised, so no scale applies
        draft_k = call.draft_k[first:end].float()
        draft_v = draft_k[..., : values.shape[-1]] if call.draft_v is None else call.draft_v[first:end].float()
        keys, values = torch.cat((keys, draft_k)), torch.cat((values, draft_v))
    missing = prefix + rows - keys.shape[0]  # draft tokens that do not exist get zeros, which nobody sees
    if missing:
        keys = torch.cat((keys, keys.new_zeros(missing, *keys.shape[1:])))
        values = torch.cat((values, values.new_zeros(missing, *values.shape[1:])))
    kv_start = 0 if kv.kv_start is None else int(kv.kv_start[r])
    return _Request(r, first, rows, prefix, kv_start, keys, values, exists)


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
    keys = keys.float() * call.k_scale
    if values is None:
        return keys, keys[..., : call.kv.v_head_dim]
    return keys, values.float() * call.v_scale


def _rows(cache: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
    """``cache[index]``; torch gathers no fp8, so its bytes are gathered."""
    if cache.dtype.itemsize == 1:
        gathered: torch.Tensor = cache.view(torch.uint8)[index]
        return gathered.view(cache.dtype)
    return cache[index]


def _visible_drafts(call: Call, request: _Request, mask_start: int) -> torch.Tensor:
    """bool [rows, rows]: which draft tokens (columns) each query token sees, by the mask alone."""
    rows, mask = request.rows, call.mask
    if mask is None:  # token t sees draft tokens j <= t
        return torch.ones(rows, rows, dtype=torch.bool, device=call.q.device).tril()
    if mask.layout == "packed":  # bit j % 64 of word j // 64
        words = mask.data[request.first : request.first + rows]
        j = torch.arange(rows, device=words.device)
        return (words[:, j // 64] >> (j % 64) & 1).bool()
    start, width, skip = _block(call, mask, request, mask_start)
    t = torch.arange(rows, device=mask.data.device)
    entries = start + t[:, None] * width + skip + t[None, :]
    return mask.data.reshape(-1)[entries] != 0


def _block(call: Call, mask: TreeMask, request: _Request, mask_start: int) -> tuple[int, int, int]:
    """(first entry, row width, entries of a row to skip) of the request's block of mask bytes."""
    indptr = None if mask.indptr is None else int(mask.indptr[request.index])
    if mask.layout == "full":  # rows of kv_start + prefix + L entries; those before the last L are never read
        before = request.kv_start + request.prefix
        return (mask_start if indptr is None else indptr), before + request.rows, before
    if indptr is not None:
        return indptr, request.rows, 0
    return request.index * call.max_query_len**2, call.max_query_len, 0


def _attend(call: Call, request: _Request, sees_draft: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out fp32 [rows, Hq, Dv], lse fp32 [rows, Hq]) of one request."""
    prefix, rows, device = request.prefix, request.rows, call.q.device
    visible = torch.ones(rows, prefix + rows, dtype=torch.bool, device=device)  # the whole prefix
    visible[:, prefix:] = sees_draft & request.exists
    if call.window is not None:
        at = request.kv_start + prefix + torch.arange(rows, device=device)
        if call.positions is not None:
            at = call.positions[request.first : request.first + rows].long()
        keys_at = torch.cat((request.kv_start + torch.arange(prefix, device=device), at))  # a draft key is at its query's
        visible &= at[:, None] - keys_at[None, :] <= call.window

    group = call.request.group
    q = call.q[request.first : request.first + rows].float()
    keys = request.keys.repeat_interleave(group, dim=1)
    values = request.values.repeat_interleave(group, dim=1)
    logits = torch.einsum("thd,nhd->htn", q, keys) * call.scale
    if call.softcap:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    logits = logits.masked_fill(~visible, float("-inf"))
    if call.sinks is not None:  # one more logit in the denominator, neither capped nor masked
        sinks = call.sinks.float()[:, None, None].expand(-1, rows, 1)
        logits = torch.cat((logits, sinks), dim=-1)
        values = torch.cat((values, values.new_zeros(1, *values.shape[1:])))
    lse = torch.logsumexp(logits, dim=-1)  # -inf for a row that sees nothing
    weights = torch.exp(logits - lse.masked_fill(lse.isinf(), 0.0)[..., None])  # which then are all 0
    return torch.einsum("htn,nhd->thd", weights, values), lse.T
