"""One point's tensors on the GPU, its masks in every layout, and its right answer. Used by run.py and the peers.

Every "layer" has a cache of its own, together more than the L2 holds several times over, so that each call reads from
memory. The draft tokens lie in the cache behind the prefix. Their keys and values are four times as large as the
prefix's: a mask read wrongly then shows in the error, also behind 65536 other keys.
"""

from __future__ import annotations

import math
import random
from functools import cached_property

import torch

from flashmap.bench.points import Point

COLD_BYTES = 420e6  # of cache, over all layers; an H200's L2 holds 60 MB
MIN_LAYERS, MAX_LAYERS = 8, 1024
DRAFT_SCALE = 4.0


class Problem:
    """The inputs of a point. T rows in all, R requests; `k`/`v` are [layers, pages, page, Hkv, D], `v` None for MLA."""

    def __init__(self, point: Point, device: str = "cuda", layers: int | None = None, same_tree: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.point, self.device, shape = point, torch.device(device), point.shape
        self.query_lens, self.prefix_lens = point.query_lens, point.prefix_lens
        self.max_query_len = max(self.query_lens)
        self.totals = [p + n for p, n in zip(self.prefix_lens, self.query_lens, strict=True)]
        self.max_kv_len = max(self.totals)
        self.scale = shape.head_dim**-0.5
        wanted = math.ceil(COLD_BYTES / point.kv_bytes)
        self.layers = layers or max(MIN_LAYERS, min(MAX_LAYERS, wanted))

        pages_of = [-(-n // point.page) for n in self.totals]
        order = torch.randperm(sum(pages_of), dtype=torch.int32)
        table = torch.zeros(point.bs, max(pages_of), dtype=torch.int32)
        for r, part in enumerate(order.split(pages_of)):
            table[r, : len(part)] = part
        self.block_table = table.to(self.device)
        self.pages_of, self.page_list = pages_of, order.to(self.device)
        self.cu_seqlens_q = self._ints(_starts(self.query_lens))
        self.kv_lens, self.kv_prefix_lens = self._ints(self.totals), self._ints(self.prefix_lens)
        self.tree: torch.Tensor | None = _trees(point, self.query_lens, same_tree, seed).to(self.device) if point.tree else None

        self.q = torch.randn(sum(self.query_lens), shape.heads, shape.head_dim, device=self.device, dtype=torch.bfloat16)
        self.k = self._cache(sum(pages_of), shape.head_dim)
        self.v = None if shape.latent else self._cache(sum(pages_of), shape.v_head_dim)
        # [0] for the first layer, [1] for the last, [2] for those between: the first two are compared with the reference.
        self.outs = torch.empty(3, self.q.shape[0], shape.heads, shape.v_head_dim, device=self.device, dtype=torch.bfloat16)

    def out(self, layer: int) -> torch.Tensor:
        """Where a call on this layer may write."""
        return self.outs[0 if layer == 0 else 1 if layer == self.layers - 1 else 2]

    def slots_of(self, request: int) -> torch.Tensor:
        """The token slots (page * page_size + offset) of one request's keys, in order."""
        i = torch.arange(self.totals[request], device=self.device)
        return self.block_table[request, i // self.point.page].long() * self.point.page + i % self.point.page

    @cached_property
    def prefix_slots(self) -> torch.Tensor:
        return torch.cat([self.slots_of(r)[:p] for r, p in enumerate(self.prefix_lens)])

    @cached_property
    def draft_slots(self) -> torch.Tensor:
        return torch.cat([self.slots_of(r)[p:] for r, p in enumerate(self.prefix_lens)])

    @cached_property
    def prefix_indptr(self) -> torch.Tensor:
        return self._ints(_starts(self.prefix_lens))

    @cached_property
    def k_slots(self) -> torch.Tensor:
        """The keys as [layers, slots, Hkv, Dk]."""
        return self.k.flatten(1, 2)

    @cached_property
    def v_slots(self) -> torch.Tensor:
        """The values as [layers, slots, Hkv, Dv]; for MLA the first columns of the keys."""
        return self.k_slots[..., : self.point.shape.v_head_dim] if self.v is None else self.v.flatten(1, 2)

    @cached_property
    def draft_k(self) -> torch.Tensor:
        """The draft tokens' keys on their own, [layers, T, Hkv, Dk]."""
        return self.k_slots[:, self.draft_slots].to(torch.bfloat16)

    @cached_property
    def draft_v(self) -> torch.Tensor:
        if self.v is None:
            return self.draft_k[..., : self.point.shape.v_head_dim]
        return self.v_slots[:, self.draft_slots].to(torch.bfloat16)

    @property
    def allowed(self) -> torch.Tensor:
        """The tree, where there is one: bool [R, L, L], row t of request r true where token t sees draft token j."""
        if self.tree is None:
            raise ValueError(f"{self.point.label} is a chain")
        return self.tree

    @cached_property
    def full_mask(self) -> torch.Tensor:
        """The tree, flat: row t of request r has prefix + L entries, the prefix's true; requests follow one another."""
        rows = []
        for r, (p, n) in enumerate(zip(self.prefix_lens, self.query_lens, strict=True)):
            block = torch.ones(n, p + n, dtype=torch.bool, device=self.device)
            block[:, p:] = self.allowed[r, :n, :n]
            rows.append(block.flatten())
        return torch.cat(rows)

    @cached_property
    def full_mask_indptr(self) -> torch.Tensor:
        starts = _starts([n * t for n, t in zip(self.query_lens, self.totals, strict=True)])
        return torch.tensor(starts, dtype=torch.int64, device=self.device)

    @cached_property
    def packed_mask(self) -> torch.Tensor:
        """The tree as bits, int64 [T, words]."""
        words = -(-self.max_query_len // 64)
        rows = torch.cat([self.allowed[r, :n] for r, n in enumerate(self.query_lens)])
        bits = torch.zeros(len(rows), words * 64, dtype=torch.int64, device=self.device)
        bits[:, : rows.shape[1]] = rows.long()
        return (bits.view(-1, words, 64) << torch.arange(64, device=self.device)).sum(-1)

    def reference(self, layer: int) -> torch.Tensor:
        """The right answer in fp32, [T, Hq, Dv], request by request and at most 2048 rows at a time."""
        torch.backends.cuda.matmul.allow_tf32 = False
        outs, shape, start = [], self.point.shape, 0
        for r, (p, n) in enumerate(zip(self.prefix_lens, self.query_lens, strict=True)):
            slots = self.slots_of(r)
            k = self.k_slots[layer, slots].float().permute(1, 2, 0)  # [Hkv, Dk, keys]
            v = self.v_slots[layer, slots].float().transpose(0, 1)  # [Hkv, keys, Dv]
            allowed = torch.ones(n, n, dtype=torch.bool, device=self.device).tril() if self.tree is None else self.tree[r, :n, :n]
            hidden = ~torch.cat([allowed.new_ones(n, p), allowed], 1)
            # row = head of the group * n + token
            q = self.q[start : start + n].float().unflatten(1, (shape.kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
            parts = []
            for rows in torch.arange(q.shape[1], device=self.device).split(2048):
                scores = (q[:, rows] * self.scale) @ k
                parts.append(scores.masked_fill_(hidden[rows % n], float("-inf")).softmax(-1) @ v)
            out = torch.cat(parts, 1).unflatten(1, (-1, n))  # [Hkv, group, n, Dv]
            outs.append(out.permute(2, 0, 1, 3).flatten(1, 2))
            start += n
        return torch.cat(outs)

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _cache(self, pages: int, width: int) -> torch.Tensor:
        shape = (self.layers, pages, self.point.page, self.point.shape.kv_heads, width)
        cache = torch.empty(shape, device=self.device, dtype=torch.float8_e4m3fn if self.point.kv == "fp8" else torch.bfloat16)
        for layer in range(self.layers):
            values = torch.randn(shape[1:], device=self.device, dtype=torch.bfloat16)
            values.flatten(0, 1)[self.draft_slots] *= DRAFT_SCALE
            cache[layer] = values.to(cache.dtype)
        return cache


def _starts(lengths: list[int]) -> list[int]:
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    return starts


def _trees(point: Point, query_lens: list[int], same: bool, seed: int) -> torch.Tensor:
    """Random trees [R, L, L]: token 0 is the root, every other has an earlier parent with at most 4 children; ancestors are seen."""
    longest = max(query_lens)
    trees = torch.zeros(point.bs, longest, longest, dtype=torch.bool)
    rng = random.Random(seed)
    for r in range(point.bs):
        if same and r:
            trees[r] = trees[0]
            continue
        children = [0] * longest
        for t in range(longest):
            if t:
                parent = rng.choice([j for j in range(t) if children[j] < 4])
                children[parent] += 1
                trees[r, t] = trees[r, parent]
            trees[r, t, t] = True
    return trees
