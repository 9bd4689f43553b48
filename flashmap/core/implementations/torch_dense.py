"""The op in plain torch: any device, every feature. The default where there is no GPU, and what is left on one.

All requests advance together through blocks of keys with a running softmax in fp32, so memory is bounded by
``_BLOCK_BYTES`` and not by the context. The query heads that share a KV head are rows of one matrix product, so K and V
are never repeated. It reads lengths on the host to plan the blocks, so it declines under graph capture.

Letters: R requests with query tokens, L the most of one, H KV heads, G query heads of each, B keys in a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashmap.core.implementations.torch_shared import check_rows, draft_mask, lengths_of
from flashmap.core.inputs import Call, PagedKV
from flashmap.core.interface import Implementation

# Gathered K and V of one block, with its logits. On a CPU about its last-level cache, and less than what glibc keeps mapped.
_BLOCK_BYTES = {"cpu": 31 << 20}
_BLOCK_BYTES_ELSEWHERE = 128 << 20  # there two blocks are alive while the next one is gathered
_LINE = 64  # bytes of a cache line, where tensors of the workspace begin
_ALIGN = 16  # keys in a block are a multiple of it, so that rows of logits begin there too
_LOG2E = math.log2(math.e)
_LOWEST = torch.finfo(torch.float32).min  # starts the running maximum: unlike -inf it can be subtracted from -inf


class TorchDense(Implementation):
    """fp32 arithmetic whatever the dtypes. Memory: that of q and out in fp32, the draft block, and one block of keys."""

    @torch.no_grad()
    def run(self, call: Call) -> None:
        batch = _plan(call)
        if batch is None:
            return
        work = _Workspace(call.q.device)
        softmax = _Softmax.start(call, batch, work)
        softmax.add(*_draft_block(call, batch, work))
        for block in _prefix_blocks(call, batch, work):
            softmax.add(*block)
        out, lse = softmax.finish()
        rows = batch.row[batch.asked]
        call.out[rows] = _ungroup(call, batch, out)[batch.asked].to(call.out.dtype)
        if call.lse is not None:
            call.lse[rows] = _ungroup(call, batch, lse)[batch.asked].squeeze(-1)


IMPLEMENTATION = TorchDense("torch_dense")


@dataclass(frozen=True, slots=True)
class _Batch:
    """The requests that ask something, the longest prefix first. Tensors are int64 on the device, lists on the host."""

    index: torch.Tensor  # [R] the request's place in the call
    row: torch.Tensor  # [R, L] row of q; where none was asked, some row of q
    asked: torch.Tensor  # bool [R, L] the request has this query token
    prefix: torch.Tensor  # [R] tokens of the prefix
    exists: torch.Tensor  # bool [R, L] the draft token has K and V
    kv_start: torch.Tensor  # [R]
    position: torch.Tensor  # [R, L]
    visible: torch.Tensor  # bool, broadcast to [R, L, L]: what the mask lets a query token see of the draft tokens
    prefixes: list[int]


def _plan(call: Call) -> _Batch | None:
    lengths = lengths_of(call)
    host_rows, host_prefix = lengths.rows.tolist(), lengths.prefix.tolist()
    check_rows(call, host_rows)
    order = sorted((r for r, n in enumerate(host_rows) if n > 0), key=lambda r: -host_prefix[r])
    if not order:
        return None
    index = torch.tensor(order, device=call.q.device)
    rows, length, prefix, kv_start = lengths.rows[index], lengths.listed[index], lengths.prefix[index], lengths.kv_start[index]
    t = torch.arange(max(host_rows), device=index.device)
    asked = t < rows[:, None]
    row = (call.cu_seqlens_q.long()[index, None] + t).clamp(max=call.q.shape[0] - 1)
    # Draft tokens in the cache exist below its length only.
    in_cache = call.draft_k is None and call.draft_slots is None
    exists = asked & (prefix[:, None] + t < length[:, None]) if in_cache else asked
    position = (kv_start + prefix)[:, None] + t if call.positions is None else call.positions[row].long()
    visible = draft_mask(call, lengths, index, row)
    return _Batch(index, row, asked, prefix, exists, kv_start, position, visible, [host_prefix[r] for r in order])


class _Workspace:
    """Memory that the blocks of a call take turns in: on a CPU a fresh block costs more in page faults than in copying.

    It is one piece, and not above 32 MiB, because then glibc keeps it when it is freed: the next call finds it mapped.
    Elsewhere torch keeps freed memory itself.
    """

    def __init__(self, device: torch.device) -> None:
        size = _BLOCK_BYTES["cpu"] if device.type == "cpu" else 0
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._used = 0

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor, valid until the workspace is cleared."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._memory) - self._used:
            return torch.empty(shape, dtype=dtype, device=self._memory.device)
        piece = self._memory[self._used : self._used + size]
        self._used = min(self._used + -(-size // _LINE) * _LINE, len(self._memory))
        return piece.view(dtype).view(shape)

    def clear(self) -> None:
        self._used = 0


@dataclass(slots=True)
class _Softmax:
    """A running softmax over blocks of keys; all tensors are fp32. Logits are in base 2: exp2 takes half the time of exp."""

    work: _Workspace
    q: torch.Tensor  # [R * H, G * L, Dk], scaled to give logits in base 2
    softcap: float
    group: int
    highest: torch.Tensor  # [R * H, G * L, 1] the largest logit so far
    total: torch.Tensor  # [R * H, G * L, 1] sum of exp2(logit - highest)
    acc: torch.Tensor  # [R * H, G * L, Dv] sum of exp2(logit - highest) * value

    @classmethod
    def start(cls, call: Call, batch: _Batch, work: _Workspace) -> _Softmax:
        request = call.request
        (n, length), heads, group = batch.row.shape, request.kv_heads, request.group
        q = call.q[batch.row].view(n, length, heads, group, -1).permute(0, 2, 3, 1, 4)
        q = q.reshape(n * heads, group * length, -1).float() * (call.scale * _LOG2E)
        highest = q.new_full((*q.shape[:2], 1), _LOWEST)
        total = torch.zeros_like(highest)
        if call.sinks is not None:  # one more logit in the denominator, neither capped nor masked
            sinks = (call.sinks.float() * _LOG2E).view(heads, group, 1).expand(n, heads, group, length).reshape(total.shape)
            highest = sinks.clamp(min=_LOWEST)
            total = torch.exp2(sinks - highest)
        return cls(work, q, call.softcap * _LOG2E, group, highest, total, q.new_zeros(*q.shape[:2], request.v_head_dim))

    def add(self, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None) -> None:
        """Keys [n, H, B, Dk] and values [n, H, B, Dv] of the first n requests; visible bool [n, L or 1, B], None: all."""
        n, heads, size = keys.shape[:3]
        batch = n * heads
        logits = self.work.take(batch, self.q.shape[1], size)
        torch.bmm(self.q[:batch], keys.flatten(0, 1).transpose(1, 2), out=logits)
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if visible is not None:
            logits.view(n, heads, self.group, -1, size).masked_fill_(~visible[:, None, None], float("-inf"))
        old, total, acc = self.highest[:batch], self.total[:batch], self.acc[:batch]
        highest = torch.maximum(old, logits.amax(-1, keepdim=True))
        weights = logits.sub_(highest).exp2_()
        keep = torch.exp2(old - highest)
        total.mul_(keep).add_(weights.sum(-1, keepdim=True))
        acc.mul_(keep).baddbmm_(weights, values.flatten(0, 1))
        old.copy_(highest)
        self.work.clear()  # nothing of the block is used any more

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse): 0 and -inf for a row that has seen nothing."""
        return self.acc / self.total.masked_fill(self.total == 0, 1.0), (self.highest + self.total.log2()) / _LOG2E


def _ungroup(call: Call, batch: _Batch, x: torch.Tensor) -> torch.Tensor:
    """[R * H, G * L, D] -> [R, L, Hq, D]."""
    n, length = batch.row.shape
    return x.view(n, call.request.heads, length, -1).transpose(1, 2)


def _draft_block(call: Call, batch: _Batch, work: _Workspace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(keys, values, visible) of the draft tokens."""
    visible = batch.visible & batch.exists[:, None, :]
    if call.window is not None:  # a draft key is at its own query's position
        visible &= batch.position[:, :, None] - batch.position[:, None, :] <= call.window
    if call.draft_k is not None:  # not quantised, so no scale applies
        keys = _gather(call.draft_k, batch.row, work)
        values = keys[..., : call.request.v_head_dim] if call.draft_v is None else _gather(call.draft_v, batch.row, work)
        return *_without(keys, values, ~batch.exists), visible
    if call.draft_slots is not None:
        slots = call.draft_slots[batch.row].long()
    else:
        slots = _slots(call, batch.index, batch.prefix[:, None] + torch.arange(batch.row.shape[1], device=batch.row.device))
    return *_without(*_load(call, slots, work), ~batch.exists), visible


def _prefix_blocks(call: Call, batch: _Batch, work: _Workspace) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """(keys, values, visible) of the prefix, block by block, for as many requests as it reaches into."""
    request, prefixes, rows = call.request, batch.prefixes, batch.row.shape[1]
    start, n = 0, len(prefixes)
    if call.window is not None:  # blocks before every request's first visible key are not read
        first = (batch.position.masked_fill(~batch.asked, torch.iinfo(torch.int64).max).amin(1) - call.window - batch.kv_start).amin()
        start = max(int(first), 0)
    kv_width = request.head_dim + (0 if request.latent else request.v_head_dim)
    stored = 0 if call.kv.k.dtype == torch.float32 else call.kv.k.dtype.itemsize
    key_bytes = request.kv_heads * (kv_width * (4 + stored) + 4 * request.group * rows)
    budget = _BLOCK_BYTES.get(call.q.device.type, _BLOCK_BYTES_ELSEWHERE) // key_bytes
    while True:
        while n and prefixes[n - 1] <= start:
            n -= 1
        if not n:
            return
        end = min(start + max(budget // n // _ALIGN, 1) * _ALIGN, prefixes[0])
        key = torch.arange(start, end, device=call.q.device).expand(n, -1)
        keys, values = _load(call, _slots(call, batch.index[:n], key), work)
        visible = None
        if prefixes[n - 1] < end:
            listed = key < batch.prefix[:n, None]
            keys, values = _without(keys, values, ~listed)
            visible = listed[:, None, :]
        if call.window is not None:
            near = batch.position[:n, :, None] - (batch.kv_start[:n, None] + key)[:, None, :] <= call.window
            visible = near if visible is None else near & visible
        yield keys, values, visible
        start = end


def _slots(call: Call, index: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The token slots of listed keys ``key`` [R, B] of requests ``index``; of keys that are not listed, any slot."""
    kv = call.kv
    if isinstance(kv, PagedKV):
        if not kv.max_kv_len:
            return torch.zeros_like(key)
        page = kv.block_table[index[:, None], (key // kv.page_size).clamp(max=kv.block_table.shape[1] - 1)].long()
        return page * kv.page_size + key % kv.page_size
    if not kv.indices.numel():
        return torch.zeros_like(key)
    return kv.indices[(kv.indptr[index, None].long() + key).clamp(max=kv.indices.numel() - 1)].long()


def _load(call: Call, slots: torch.Tensor, work: _Workspace) -> tuple[torch.Tensor, torch.Tensor]:
    """K [n, H, B, Dk] and V [n, H, B, Dv] of token slots [n, B] in fp32, dequantised. A latent V is a view of K."""
    kv = call.kv
    keys = _scaled(_gather(kv.k, slots, work), call.k_scale)
    if kv.v is None:
        return keys, keys[..., : kv.v_head_dim]
    return keys, _scaled(_gather(kv.v, slots, work), call.v_scale)


def _scaled(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return x.mul_(scale.view(()))
    return x if scale == 1.0 else x.mul_(scale)


def _gather(cache: torch.Tensor, slots: torch.Tensor, work: _Workspace) -> torch.Tensor:
    """fp32 [n, H, B, D] of a cache [pages, page_size, H, D] or [slots, H, D]. Slots out of range give any row.

    It is a view of [B, n, H, D]: a token's heads, mostly neighbours in the cache, stay together, so that one copy moves
    them all, and n and H are still one dimension for bmm. Whatever the strides, what is copied starts at a multiple of
    ``step`` elements: one index_select over rows that begin there, which may overlap, copies no more than is asked for.
    """
    (heads, dim), n = cache.shape[-2:], slots.shape[0]
    shape = (slots.shape[1], n, heads, dim)
    if not cache.numel():
        return work.take(*shape).zero_().permute(1, 2, 0, 3)
    if cache.stride(-2) == dim:
        cache = cache.flatten(-2).unsqueeze(-2)
    (parts, width), places = cache.shape[-2:], cache.shape[:-2]
    slots = slots.T.clamp(0, math.prod(places) - 1)
    at = (slots,) if len(places) == 1 else (slots // places[1], slots % places[1])
    step = math.gcd(*cache.stride()[:-1]) or 1
    last = sum((size - 1) * stride for size, stride in zip(cache.shape[:-1], cache.stride()[:-1], strict=True))
    raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # torch gathers no fp8
    rows = raw.as_strided((last // step + 1, width), (step, 1))
    place = sum((i * (stride // step) for i, stride in zip(at, cache.stride(), strict=False)), torch.zeros_like(slots))
    part = torch.arange(parts, device=slots.device) * (cache.stride(-2) // step)
    index = (place[..., None] + part).flatten()
    found = torch.index_select(rows, 0, index, out=work.take(index.numel(), width, dtype=raw.dtype)).view(cache.dtype)
    if found.dtype != torch.float32:
        found = work.take(*found.shape).copy_(found)
    return found.view(shape).permute(1, 2, 0, 3)


def _without(keys: torch.Tensor, values: torch.Tensor, gone: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros where ``gone`` [n, B]: a weight of 0 would not silence a NaN. A masked logit hides what its key was."""
    return keys, values.masked_fill_(gone[:, None, :, None], 0.0)
