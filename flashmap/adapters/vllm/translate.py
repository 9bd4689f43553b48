"""vLLM's metadata in the op's words. No attention arithmetic; nothing here imports vLLM, so it is tested without it.

``dense_reason`` and ``latent_reason`` say why a call stays with the engine whatever the op could do (a code for the
counters, or None); ``dense_request`` and ``latent_request`` give dispatch the static facts of a call; ``strided_kv``,
``gathered_kv`` and ``latent_kv`` the cache as a PagedKV. ``Part`` is the requests of a batch that verify. ``PageLayout`` is for CPU_ATTN,
whose pages hold K and V in an order of their own.

Codes: metadata (profiling, no request), decode (one token a request), prefill (more tokens than a verify batch has),
attn_type, alibi, chunked (chunked attention with lookback), non_causal, output_scale (fused quantisation), query_dtype, kv_dtype, scales (more than
one for K or V), dcp (KV spread over ranks), batch_invariant, lse (the engine wants it), argument (metadata that we do not know is in use), contract
(an attribute that we rely on is gone), kv_layout, input (the op refuses it).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashmap.core.inputs import DTYPE_NAMES, PagedKV, aligned
from flashmap.core.request import VerifyRequest

MAX_QUERY_LEN = 64  # the op's chains and trees end there; longer queries are prefill

_PLAIN = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn  # what vLLM's CUDA backends take a cache of "fp8" for

# What an implementation has once it is made, besides what its signatures say.
DENSE_ATTRIBUTES = ("num_heads", "num_kv_heads", "head_size", "scale", "alibi_slopes", "sliding_window", "logits_soft_cap", "attn_type", "kv_cache_dtype", "sinks")  # fmt: skip
LATENT_ATTRIBUTES = ("num_heads", "kv_lora_rank", "qk_rope_head_dim", "scale", "kv_cache_dtype", "dcp_world_size")


# -- which batches, and which requests of a batch -----------------------------------------------------------------------


def lengths(speculative: Any) -> tuple[int, ...]:
    """The most query tokens of a request in verify batches and in a drafter's first pass, ascending; () without speculation.

    A batch is shown to the op with the first of them that it does not exceed: the op compiles for a bound, and must not do so while
    serving. ``speculative``: vLLM's speculative_config, or None.
    """
    drafts = getattr(speculative, "num_speculative_tokens", None) or 0
    if not drafts:
        return ()
    longest = 1 + drafts
    if getattr(speculative, "parallel_drafting", False):
        longest += drafts
    elif getattr(speculative, "method", None) == "draft_model":  # its first pass has the last accepted token twice
        longest += 1
    return tuple(n for n in dict.fromkeys((1 + drafts, longest)) if n <= MAX_QUERY_LEN)


def bound(max_query_len: int, lengths: tuple[int, ...] | None) -> int | None:
    """A bound for a batch, or None: it is prefill. ``lengths`` None: not known, any up to ``MAX_QUERY_LEN``."""
    if lengths is None:
        return max_query_len if max_query_len <= MAX_QUERY_LEN else None
    return next((n for n in lengths if max_query_len <= n), None)


@dataclass(frozen=True, slots=True)
class Part:
    """The first ``requests`` of a batch, whose ``rows`` query tokens are decoded or verified, none with more than ``longest``."""

    requests: int
    rows: int
    longest: int
    of_rows: int

    @classmethod
    def of(cls, starts: torch.Tensor, lengths: tuple[int, ...]) -> Part | None:
        """The part of a mixed batch, by its query_start_loc on the host [R + 1]: all before the first prefill. None: there is none."""
        widths = starts[1:] - starts[:-1]
        prefill = widths > lengths[-1]
        requests = int(prefill.int().argmax())
        if not requests or not bool(prefill[requests]):
            return None
        longest = int(widths[:requests].max())
        return cls(requests, int(starts[requests]), longest, int(starts[-1])) if longest > 1 else None


def rest(metadata: Any, part: Part) -> Any:
    """The metadata of a dense batch without ``part``, for the engine's own kernel."""
    starts = metadata.query_start_loc[part.requests :]
    return dataclasses.replace(
        metadata,
        num_actual_tokens=metadata.num_actual_tokens - part.rows,
        query_start_loc=starts - starts[0],
        seq_lens=metadata.seq_lens[part.requests :],
        block_table=metadata.block_table[part.requests :],
        slot_mapping=metadata.slot_mapping[part.rows :],
        scheduler_metadata=None,  # was made for the whole batch; the kernel then makes its own
    )


# -- keys and values of every head --------------------------------------------------------------------------------------

# What metadata may hold besides what is read here, without changing what is attended to.
_HARMLESS = frozenset((
    "num_actual_tokens", "max_query_len", "query_start_loc", "max_seq_len", "seq_lens", "block_table", "slot_mapping", "causal", "sliding_window",
    "seq_threshold_3D", "num_par_softmax_segments", "softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum", "scheduler_metadata",
    "max_num_splits", "use_sdpa_prefill", "num_decode_tokens", "sdpa_attn_masks", "sdpa_start_loc",
))  # fmt: skip


@functools.cache
def _unknown_fields(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind) if f.name not in _HARMLESS) if dataclasses.is_dataclass(kind) else ()


def _is_set(value: Any) -> bool:
    return value is not None and not (isinstance(value, int) and value == 0)  # False is an int too


def dense_reason(
    impl: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor, output_scale: Any
) -> str | None:
    """Why this call of a dense backend is not one for the op, whatever its lengths: a code, or None."""
    if getattr(impl, "attn_type", "decoder") != "decoder":
        return "attn_type"
    if metadata.causal is not True or getattr(metadata, "dynamic_causal", None) is not None:
        return "non_causal"
    if any(_is_set(getattr(metadata, name)) for name in _unknown_fields(metadata.__class__)):
        return "argument"
    if impl.alibi_slopes is not None:
        return "alibi"
    if getattr(impl, "chunk_lookback", -1) != -1:
        return "chunked"
    if getattr(impl, "dcp_world_size", 1) > 1:
        return "dcp"
    if output_scale is not None:
        return "output_scale"
    return dtype_reason(query.dtype, output.dtype, kv_cache.dtype, str(impl.kv_cache_dtype))


def dtype_reason(query: torch.dtype, output: torch.dtype, cache: torch.dtype, named: str) -> str | None:
    """``named``: vLLM's kv_cache_dtype. A quantised query comes with a quantised cache, which may be typed as bytes."""
    if output not in _PLAIN or query not in (output, FP8):
        return "query_dtype"
    if named in ("fp8", "fp8_e4m3"):
        return None if cache in (FP8, torch.uint8) else "kv_dtype"
    if query != output:
        return "query_dtype"
    return "kv_dtype" if cache != output or named.startswith(("fp8", "int")) else None


def length_reason(max_query_len: int, lengths: tuple[int, ...] | None = None) -> str | None:
    """Verify batches have more than one query token in some request, and no more than ``lengths`` says in any."""
    if max_query_len <= 1:
        return "decode"
    return "prefill" if bound(max_query_len, lengths) is None else None


def window(impl: Any, metadata: Any = None) -> int | None:
    """vLLM's window counts the keys that a query sees, itself among them; the op's how far back the first of them is."""
    size = getattr(metadata, "sliding_window", None)  # FLASH_ATTN of 0.26 goes by the group's
    size = impl.sliding_window if size is None else size
    if isinstance(size, (tuple, list)):  # the GPU backends' (left, right), where left is already a distance
        return None if size[0] < 0 else int(size[0])
    return None if size is None or size < 0 else int(size) - 1


def softcap(impl: Any) -> float:
    return float(impl.logits_soft_cap or 0.0)


def is_fp8(impl: Any) -> bool:
    return str(impl.kv_cache_dtype).startswith("fp8")


def _typed(impl: Any, cache: torch.Tensor) -> torch.Tensor:
    """A quantised cache, which vLLM may type as bytes, in its own dtype."""
    return cache.view(FP8) if is_fp8(impl) and cache.dtype != FP8 else cache


def dense_request(
    impl: Any, dtype: torch.dtype, *, num_requests: int, max_query_len: int, page_size: int, max_kv_len: int, window: int | None,
    aligned: bool = True,
) -> VerifyRequest:  # fmt: skip
    """The static facts of a call; ``dtype``: the output's."""
    fp8 = is_fp8(impl)
    return VerifyRequest(
        heads=impl.num_heads,
        kv_heads=impl.num_kv_heads,
        head_dim=impl.head_size,
        v_head_dim=impl.head_size,
        dtype=DTYPE_NAMES.get(dtype, str(dtype)),
        kv_dtype=DTYPE_NAMES[FP8] if fp8 else DTYPE_NAMES.get(dtype, str(dtype)),
        num_requests=num_requests,
        max_query_len=max_query_len,
        page_size=page_size,
        max_kv_len=max_kv_len,
        window=window,
        sinks=impl.sinks is not None,
        softcap=softcap(impl) != 0.0,
        scales="device" if fp8 else "none",
        aligned=aligned,
    )


def plain_query(query: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    """A quantised query as the op takes it."""
    return query if query.dtype == dtype else query.to(dtype) * scale.to(dtype)


def side_by_side(impl: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_cache [pages, Hkv, page_size, 2 * D] as two views K and V [pages, page_size, Hkv, D]: NHD and HND are strides alone."""
    k, v = torch.split(_typed(impl, kv_cache).transpose(1, 2), impl.head_size, dim=-1)
    return k, v


def side_by_side_aligned(impl: Any, dtype: torch.dtype) -> bool:
    """Whether those views of a cache that vLLM has yet to allocate, for a model of ``dtype``, will be ``aligned``."""
    itemsize = 1 if is_fp8(impl) else dtype.itemsize
    return bool(2 * impl.head_size % 16 == 0 and impl.head_size * itemsize % 16 == 0)


def strided_kv(impl: Any, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> PagedKV:
    return PagedKV(*side_by_side(impl, kv_cache), block_table, seq_lens)


# -- CPU_ATTN: pages in an order of their own ---------------------------------------------------------------------------


def gathered_kv(kv_cache: torch.Tensor, layout: PageLayout, block_table: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int) -> PagedKV:
    """The pages that the batch uses, with K and V as the op wants them. Copies those pages: K is not stored row by row."""
    page_size = kv_cache.shape[2]
    table = block_table[:, : -(-max_seq_len // page_size)]
    requests, width = table.shape
    pages = table.reshape(-1).long().clamp(0, kv_cache.shape[0] - 1)  # the table's tail may name any page
    content = kv_cache.view(kv_cache.shape[0], -1).index_select(0, pages)
    renumbered = torch.arange(requests * width, dtype=torch.int32, device=table.device).view(requests, width)
    return PagedKV(layout.keys(content), layout.values(content), renumbered, seq_lens)


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
    aligned: bool  # of what ``keys`` and ``values`` give

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
        k, v = (_Place.of(place) for place in order.view(2, heads, rows, columns))
        content = torch.zeros_like(page).view(1, -1)
        return cls(k, v, aligned(k.take(content)) and aligned(v.take(content)))

    def keys(self, pages: torch.Tensor) -> torch.Tensor:
        """[pages, E] -> K [pages, page_size, Hkv, D]."""
        return self.k.take(pages)

    def values(self, pages: torch.Tensor) -> torch.Tensor:
        """[pages, E] -> V [pages, page_size, Hkv, D]."""
        return self.v.take(pages)


# -- latent attention: one row a token ----------------------------------------------------------------------------------


def latent_reason(impl: Any, query: torch.dtype, output: torch.dtype, cache: torch.Tensor, metadata: Any) -> str | None:
    """Why this call of an MLA backend's ``forward_mqa`` is not one for the op, whatever its lengths: a code, or None."""
    if getattr(metadata, "causal", True) is not True:  # 0.26 has no such field
        return "non_causal"
    if impl.dcp_world_size > 1:
        return "dcp"
    if getattr(impl, "need_to_return_lse_for_decode", False):
        return "lse"
    return dtype_reason(query, output, cache.dtype, str(impl.kv_cache_dtype))


def latent_bound(metadata: Any, threshold: int) -> int:
    """The most query tokens of a request in ``forward_mqa``: the metadata's own maximum is the whole batch's, prefill included."""
    decodes = getattr(metadata.decode, "max_query_len", None)
    return int(min(metadata.max_query_len, threshold if decodes is None else min(threshold, decodes)))


def latent_request(
    impl: Any, dtype: torch.dtype, *, num_requests: int, max_query_len: int, page_size: int, max_kv_len: int, aligned: bool = True
) -> VerifyRequest:
    """The static facts of a call of ``forward_mqa``: one latent KV head, whose first ``kv_lora_rank`` columns are V."""
    fp8 = is_fp8(impl)
    return VerifyRequest(
        heads=impl.num_heads,
        kv_heads=1,
        head_dim=impl.kv_lora_rank + impl.qk_rope_head_dim,
        v_head_dim=impl.kv_lora_rank,
        dtype=DTYPE_NAMES.get(dtype, str(dtype)),
        kv_dtype=DTYPE_NAMES[FP8] if fp8 else DTYPE_NAMES.get(dtype, str(dtype)),
        num_requests=num_requests,
        max_query_len=max_query_len,
        page_size=page_size,
        max_kv_len=max_kv_len,
        latent=True,
        scales="device" if fp8 else "none",
        aligned=aligned,
    )


def latent_kv(impl: Any, cache: torch.Tensor, decode: Any) -> PagedKV:
    """cache [pages, page_size, rank + rope] as it is."""
    return PagedKV(_typed(impl, cache).unsqueeze(2), None, decode.block_table, decode.seq_lens, v_head_dim=impl.kv_lora_rank)


def row_by_row(metadata: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(block_table, seq_lens) that show each query token of a verify batch as a request of its own, with one token.

    For engine kernels made for one token a request: token t of L sees the keys up to itself, which is L - 1 - t less
    than the request has. Rows past the last request, a graph's filling, see none.
    """
    decode = metadata.decode
    requests = decode.seq_lens.shape[0]
    ends = metadata.query_start_loc[1 : requests + 1].long()
    row = torch.arange(rows, device=ends.device)
    owner = torch.searchsorted(ends, row, right=True).clamp(max=requests - 1)
    behind = ends[owner] - 1 - row
    lens = torch.where(behind < 0, 0, decode.seq_lens[owner] - behind)
    return decode.block_table[owner], lens.clamp(min=0).to(decode.seq_lens.dtype)
