"""A call's lengths and masks in plain torch, for implementations that are planned there. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashmap.core.inputs import Call, PagedKV


@dataclass(frozen=True, slots=True)
class Lengths:
    """int64 [R] on the device: of each request its query tokens, the tokens that its cache lists, how many of those are its
    prefix, and the position of the first."""

    rows: torch.Tensor
    listed: torch.Tensor
    prefix: torch.Tensor
    kv_start: torch.Tensor


def lengths_of(call: Call) -> Lengths:
    kv, rows = call.kv, call.cu_seqlens_q.long().diff()
    # A length past the table's width is clamped to it.
    listed = kv.kv_lens.long().clamp(0, kv.max_kv_len) if isinstance(kv, PagedKV) else kv.indptr.long().diff()
    # Only without draft_kv and draft_slots does the list end with the draft tokens.
    in_cache = call.draft_k is None and call.draft_slots is None
    prefix = (listed - rows).clamp(min=0) if in_cache else listed
    return Lengths(rows, listed, prefix, torch.zeros_like(listed) if kv.kv_start is None else kv.kv_start.long())


def check_rows(call: Call, rows: list[int]) -> None:
    """ValueError where a request has more query tokens than the call said."""
    for r, n in enumerate(rows):
        if n > call.max_query_len:
            raise ValueError(f"request {r} has {n} query tokens, more than max_query_len {call.max_query_len}")


def draft_mask(call: Call, lengths: Lengths, index: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """bool, broadcast to [n, L, L]: which draft tokens (last dimension) each query token sees, by the mask alone.

    Of the requests ``index`` [n]; ``row`` [n, L]: the rows of q that their query tokens are, any row where there is none.
    """
    mask, length = call.mask, row.shape[1]
    t = torch.arange(length, device=row.device)
    if mask is None:
        return (t[None, :] <= t[:, None])[None]
    if mask.layout == "packed":
        return (mask.data[row][..., t // 64] >> (t % 64) & 1).bool()
    rows, skip = lengths.rows, torch.zeros_like(lengths.rows)
    if mask.layout == "full":  # rows of kv_start + prefix + L entries; those before the last L are never read
        skip = lengths.kv_start + lengths.prefix
    width = skip + rows
    if mask.indptr is not None:
        start = mask.indptr[: len(rows)].long()
    elif mask.layout == "full":
        start = (rows * width).cumsum(0) - rows * width
    else:
        start = torch.arange(len(rows), device=row.device) * call.max_query_len**2
        width = torch.full_like(rows, call.max_query_len)
    entries = (start + skip)[index, None, None] + t[None, :, None] * width[index, None, None] + t
    return mask.data.reshape(-1)[entries.clamp(0, mask.data.numel() - 1)] != 0


def visible(call: Call, lengths: Lengths, index: Sequence[int], rows: Sequence[int], listed: Sequence[int]) -> list[torch.Tensor]:
    """bool [rows, listed] of each of the requests ``index``: which keys in the cache each query token sees. Not for draft_kv or
    draft_slots. ``rows`` and ``listed`` are those requests' lengths, on the host."""
    device = call.q.device
    request, t = torch.tensor(index, device=device), torch.arange(max(rows), device=device)
    row = (call.cu_seqlens_q.long()[request, None] + t).clamp(max=call.q.shape[0] - 1)
    drafts = draft_mask(call, lengths, request, row).expand(len(index), -1, -1)
    position = (lengths.kv_start + lengths.prefix)[request, None] + t if call.positions is None else call.positions[row].long()
    found = []
    for i, (n, keys) in enumerate(zip(rows, listed, strict=True)):
        prefix = max(keys - n, 0)
        sees = torch.ones(n, keys, dtype=torch.bool, device=device)
        sees[:, prefix:] = drafts[i, :n, : keys - prefix]
        if call.window is not None:  # a draft key is at its own query's position
            prefix_at = lengths.kv_start[index[i]] + torch.arange(prefix, device=device)
            sees &= position[i, :n, None] - torch.cat((prefix_at, position[i, : keys - prefix])) <= call.window
        found.append(sees)
    return found
