"""vLLM's metadata in the op's words. No attention arithmetic; nothing here imports vLLM, so it is tested without it.

``dense_reason`` and ``latent_reason`` say why a call stays with the engine whatever the op could do (a code for the
counters, or None); ``dense_request`` and ``latent_request`` give dispatch the static facts of a call; ``dense_kv`` and
``latent_kv`` the cache as a PagedKV. ``PageLayout`` is for CPU_ATTN, whose pages hold K and V in an order of their own.

Codes: metadata (profiling, no request), decode (one token a request), prefill (more than ``MAX_QUERY_LEN``), attn_type,
alibi, non_causal, output_scale (fused quantisation), query_dtype, kv_dtype, dcp (KV spread over ranks),
contract (an attribute that we rely on is gone), kv_layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashmap.core.inputs import PagedKV
from flashmap.core.request import VerifyRequest

MAX_QUERY_LEN = 64  # the op's chains and trees end there; longer queries are prefill

_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

# What an implementation of CPU_ATTN has once it is made, besides what its signatures say.
DENSE_ATTRIBUTES = ("num_heads", "num_kv_heads", "head_size", "scale", "alibi_slopes", "sliding_window", "logits_soft_cap", "attn_type", "kv_cache_dtype", "sinks")  # fmt: skip
LATENT_ATTRIBUTES = ("num_heads", "kv_lora_rank", "qk_rope_head_dim", "scale", "kv_cache_dtype", "dcp_world_size")


# -- CPU_ATTN and its like: keys and values of every head ---------------------------------------------------------------


def dense_reason(impl: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output_scale: Any) -> str | None:
    """Why this call of a dense backend is not one for the op: a code, or None."""
    if metadata is None:
        return "metadata"
    if getattr(impl, "attn_type", "decoder") != "decoder":
        return "attn_type"
    code = length_reason(metadata.max_query_len)
    if code is not None:
        return code
    if metadata.causal is not True or getattr(metadata, "dynamic_causal", None) is not None:
        return "non_causal"
    if impl.alibi_slopes is not None:
        return "alibi"
    if getattr(impl, "dcp_world_size", 1) > 1:
        return "dcp"
    if output_scale is not None:
        return "output_scale"
    if query.dtype not in _NAMES:
        return "query_dtype"
    if kv_cache.dtype != query.dtype or str(impl.kv_cache_dtype).startswith("fp8"):
        return "kv_dtype"
    return None


def length_reason(max_query_len: int) -> str | None:
    """Verify batches have more than one query token in some request, and no more than ``MAX_QUERY_LEN`` in any."""
    if max_query_len <= 1:
        return "decode"
    return "prefill" if max_query_len > MAX_QUERY_LEN else None


def window(impl: Any) -> int | None:
    """vLLM's window counts the keys that a query sees, itself among them; the op's how far back the first of them is."""
    size = impl.sliding_window
    if isinstance(size, (tuple, list)):  # the GPU backends' (left, right), where left is already a distance
        return None if size[0] < 0 else int(size[0])
    return None if size is None or size < 0 else int(size) - 1


def softcap(impl: Any) -> float:
    return float(impl.logits_soft_cap or 0.0)


def dense_request(impl: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> VerifyRequest:
    """The static facts of a call: kv_cache is [pages, Hkv, page_size, 2 * D]."""
    page_size = kv_cache.shape[2]
    return VerifyRequest(
        heads=impl.num_heads,
        kv_heads=impl.num_kv_heads,
        head_dim=impl.head_size,
        v_head_dim=impl.head_size,
        dtype=_NAMES[query.dtype],
        kv_dtype=_NAMES[kv_cache.dtype],
        num_requests=metadata.seq_lens.shape[0],
        max_query_len=metadata.max_query_len,
        page_size=page_size,
        max_kv_len=metadata.block_table.shape[1] * page_size,
        window=window(impl),
        sinks=impl.sinks is not None,
        softcap=softcap(impl) != 0.0,
    )


def dense_kv(kv_cache: torch.Tensor, layout: PageLayout, metadata: Any) -> PagedKV:
    """The pages that the batch uses, with K and V as the op wants them. Copies those pages: K is not stored row by row."""
    page_size = kv_cache.shape[2]
    table = metadata.block_table[:, : -(-metadata.max_seq_len // page_size)]
    requests, width = table.shape
    pages = table.reshape(-1).long().clamp(0, kv_cache.shape[0] - 1)  # the table's tail may name any page
    content = kv_cache.view(kv_cache.shape[0], -1).index_select(0, pages)
    renumbered = torch.arange(requests * width, dtype=torch.int32, device=table.device).view(requests, width)
    return PagedKV(layout.keys(content), layout.values(content), renumbered, metadata.seq_lens)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a page of E elements keeps element (head, row, column): at ``index``, or plainly at ``start`` + ``strides``."""

    index: torch.Tensor  # int64 [Hkv, page_size, D]
    start: int
    strides: tuple[int, int, int] | None

    @classmethod
    def of(cls, index: torch.Tensor) -> _Place:
        start = int(index[0, 0, 0])
        steps = [int(index.select(d, min(1, index.shape[d] - 1)).flatten()[0]) - start for d in range(3)]
        plain = torch.full_like(index, start)
        for d, (step, size) in enumerate(zip(steps, index.shape, strict=True)):
            plain += step * torch.arange(size).view([-1 if e == d else 1 for e in range(3)])
        return cls(index, start, (steps[0], steps[1], steps[2]) if torch.equal(plain, index) else None)

    def take(self, pages: torch.Tensor) -> torch.Tensor:
        """[pages, E] -> [pages, page_size, Hkv, D] with a contiguous last dimension."""
        heads, rows, columns = self.index.shape
        if self.strides is None:
            return pages[:, self.index.reshape(-1)].view(-1, heads, rows, columns).transpose(1, 2)
        head, row, column = self.strides
        found = pages.as_strided((pages.shape[0], rows, heads, columns), (pages.stride(0), row, head, column), self.start)
        return found if column == 1 or columns == 1 else found.contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class PageLayout:
    """Where one page keeps its keys and values, as measured.

    vLLM's CPU kernels store K transposed, or packed for matrix instructions, as the instruction set of the machine wants
    it; no interface of vLLM says how. So the engine's own writer is given numbers, and where they end up is the layout.
    """

    k: _Place
    v: _Place

    @classmethod
    def measure(
        cls, page: torch.Tensor, write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    ) -> PageLayout | None:
        """The layout of pages like ``page`` [1, Hkv, page_size, 2 * D], which ``write(key, value, pages, slots)`` fills.

        None when what is written cannot be found again, element by element.
        """
        _, heads, rows, width = page.shape
        columns, half = width // 2, heads * rows * width // 2
        number = torch.arange(2 * half).view(2, heads, rows, columns).transpose(1, 2)  # [K and V, row, head, column]
        slots = torch.arange(rows)
        where = torch.zeros(2 * half, dtype=torch.long)
        base = 256  # whole numbers below it are exact in every dtype that can be in the cache
        for power in range(8):
            digit = (number // base**power % base).to(page.dtype)
            scratch = torch.zeros_like(page)
            write(digit[0].contiguous(), digit[1].contiguous(), scratch, slots)
            where += scratch.reshape(-1).long() * base**power
            if base ** (power + 1) >= 2 * half:
                break
        order = where.argsort()
        if not torch.equal(where[order], torch.arange(2 * half)):
            return None
        place = order.view(2, heads, rows, columns)
        return cls(_Place.of(place[0]), _Place.of(place[1]))

    def keys(self, pages: torch.Tensor) -> torch.Tensor:
        """[pages, E] -> K [pages, page_size, Hkv, D]."""
        return self.k.take(pages)

    def values(self, pages: torch.Tensor) -> torch.Tensor:
        """[pages, E] -> V [pages, page_size, Hkv, D]."""
        return self.v.take(pages)


# -- CPU_MLA and its like: one latent row a token -----------------------------------------------------------------------


def latent_reason(impl: Any, dtype: torch.dtype, cache: torch.Tensor, metadata: Any, max_query_len: int) -> str | None:
    """Why this call of an MLA backend's ``forward_mqa`` is not one for the op: a code, or None."""
    code = length_reason(max_query_len)
    if code is not None:
        return code
    if metadata.num_decode_tokens == metadata.num_decodes:  # no padding on a CPU: one token each
        return "decode"
    if metadata.causal is not True:
        return "non_causal"
    if impl.dcp_world_size > 1:
        return "dcp"
    if dtype not in _NAMES:
        return "query_dtype"
    return "kv_dtype" if cache.dtype != dtype else None


def latent_request(
    impl: Any, dtype: torch.dtype, *, num_requests: int, max_query_len: int, page_size: int, max_kv_len: int
) -> VerifyRequest:
    """The static facts of a call of ``forward_mqa``: one latent KV head, whose first ``kv_lora_rank`` columns are V."""
    return VerifyRequest(
        heads=impl.num_heads,
        kv_heads=1,
        head_dim=impl.kv_lora_rank + impl.qk_rope_head_dim,
        v_head_dim=impl.kv_lora_rank,
        dtype=_NAMES.get(dtype, str(dtype)),
        kv_dtype=_NAMES.get(dtype, str(dtype)),
        num_requests=num_requests,
        max_query_len=max_query_len,
        page_size=page_size,
        max_kv_len=max_kv_len,
        latent=True,
    )


def latent_kv(impl: Any, cache: torch.Tensor, decode: Any) -> PagedKV:
    """cache [pages, page_size, rank + rope] as it is."""
    return PagedKV(cache.unsqueeze(2), None, decode.block_table, decode.seq_lens, v_head_dim=impl.kv_lora_rank)


def row_by_row(metadata: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(block_table, seq_lens) that show each query token of a verify batch as a request of its own, with one token.

    For engine kernels made for one token a request: token t of L sees the keys up to itself, which is L - 1 - t less
    than the request has.
    """
    decode = metadata.decode
    requests = decode.seq_lens.shape[0]
    starts = metadata.query_start_loc[: requests + 1].long()
    owner = torch.repeat_interleave(torch.arange(requests, device=starts.device), starts[1:] - starts[:-1], output_size=rows)
    behind = starts[1:][owner] - 1 - torch.arange(rows, device=starts.device)
    lens = decode.seq_lens[owner] - behind
    return decode.block_table[owner], lens.clamp(min=0).to(decode.seq_lens.dtype)
