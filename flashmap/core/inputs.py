"""The op's arguments as objects, and their validation.

What one object can know is checked in its constructor; what needs the others, in :func:`resolve`, which turns a
call's arguments into one checked :class:`Call`. Nothing here reads a device value or launches anything.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashmap.core.request import VerifyRequest

DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
_QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_INT32 = (torch.int32,)
_INTS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_BYTES = (torch.bool, torch.uint8, torch.int8)
_WIDEST_WINDOW = 1 << 30  # wider ones hide nothing either, and differences of positions stay within 32 bits

# Equal calls get the same VerifyRequest: looking up what was decided for it then compares identities.
_request = functools.lru_cache(maxsize=4096)(VerifyRequest)


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """A paged cache. Key i of request r lies in page ``block_table[r, i // page_size]`` at row ``i % page_size``.

    Args:
        k: [pages, page_size, Hkv, Dk], any strides with a contiguous last dimension.
        v: [pages, page_size, Hkv, Dv]; None for a latent (MLA) cache, whose V is the first ``v_head_dim`` columns of k.
        block_table: int32 [R, W]. Entries past a request's length are never followed.
        kv_lens: int32 or int64 [R], on the device. A length past the table's width is clamped to it.
        v_head_dim: Dv; needed when v is None.
        kv_start: int32 or int64 [R]: position of the first listed key (default 0).

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
    """

    k: torch.Tensor
    v: torch.Tensor | None
    block_table: torch.Tensor
    kv_lens: torch.Tensor
    v_head_dim: int | None = None
    kv_start: torch.Tensor | None = None

    layout = "paged"

    def __post_init__(self) -> None:
        _check_cache(self.k, self.v, self.v_head_dim, "[pages, page_size, Hkv, Dk]")
        if self.k.shape[1] < 1:
            raise ValueError(f"k must have a page_size of at least 1, got shape {tuple(self.k.shape)}")
        _check("block_table", self.block_table, 2, _INT32, self.k, shape="[R, W]")
        _check("kv_lens", self.kv_lens, 1, _INTS, self.k, shape="[R]")
        if self.kv_lens.shape[0] != self.block_table.shape[0]:
            raise ValueError(
                f"kv_lens has {self.kv_lens.shape[0]} entries, block_table {self.block_table.shape[0]} rows: both are one per request"
            )
        _check_start(self.kv_start, self.num_requests, self.k)

    @property
    def num_requests(self) -> int:
        return self.block_table.shape[0]

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def max_kv_len(self) -> int:
        """The most keys that the table can list for a request."""
        return self.block_table.shape[1] * self.k.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class SlotKV:
    """A cache of token slots. Key i of request r lies in slot ``indices[indptr[r] + i]``.

    Args:
        k: [slots, Hkv, Dk], any strides with a contiguous last dimension.
        v: [slots, Hkv, Dv]; None for a latent (MLA) cache, whose V is the first ``v_head_dim`` columns of k.
        indptr: int32 or int64 [R + 1]; ``indptr[0]`` may be more than 0.
        indices: int32 or int64, at least indptr[R] entries; what lies behind them is never followed.
        v_head_dim, kv_start: as for :class:`PagedKV`.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
    """

    k: torch.Tensor
    v: torch.Tensor | None
    indptr: torch.Tensor
    indices: torch.Tensor
    v_head_dim: int | None = None
    kv_start: torch.Tensor | None = None

    layout = "slots"
    page_size = 1
    max_kv_len = None

    def __post_init__(self) -> None:
        _check_cache(self.k, self.v, self.v_head_dim, "[slots, Hkv, Dk]")
        _check("indptr", self.indptr, 1, _INTS, self.k, shape="[R + 1]")
        if self.indptr.shape[0] < 1:
            raise ValueError("indptr is empty: it needs R + 1 entries, [0] for no request")
        _check("indices", self.indices, 1, _INTS, self.k, shape="[tokens]")
        _check_start(self.kv_start, self.num_requests, self.k)

    @property
    def num_requests(self) -> int:
        return self.indptr.shape[0] - 1


@dataclass(frozen=True, slots=True, eq=False)
class TreeMask:
    """Which draft tokens each query token sees (non-zero: sees). The prefix is always seen.

    Args:
        data: "full": 1-D bytes, row t of request r has kv_start + prefix + L entries, the last L for the draft tokens.
            "qlen": bytes, L x L per request at ``indptr[r]``; without indptr block r starts at r * max_query_len**2
            with rows of max_query_len (flat or [R, L, L]). "packed": int64 [T, words], bit j % 64 of word j // 64.
            Bytes are bool, uint8 or int8.
        layout: "full", "qlen" or "packed".
        indptr: int32 or int64, R or R + 1 entries: where each request's block starts. Not for "packed".

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
    """

    data: torch.Tensor
    layout: str
    indptr: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.layout not in ("full", "qlen", "packed"):
            raise ValueError(f"layout must be 'full', 'qlen' or 'packed', got {self.layout!r}")
        if self.layout == "packed":
            _check("data", self.data, 2, (torch.int64,), None, shape="[T, words]")
            if self.indptr is not None:
                raise ValueError("indptr does not go with layout 'packed', whose rows are those of q: leave it out")
            return
        if self.layout == "qlen" and self.indptr is None and isinstance(self.data, torch.Tensor) and self.data.dim() == 3:
            _check("data", self.data, 3, _BYTES, None, shape="[R, L, L]")
            if not self.data.is_contiguous():
                raise ValueError(f"data of shape [R, L, L] must be contiguous, got strides {self.data.stride()}: call .contiguous()")
        else:
            _check("data", self.data, 1, _BYTES, None, shape="flat")
        if self.indptr is not None:
            _check("indptr", self.indptr, 1, _INTS, self.data, shape="[R] or [R + 1]")


KVCache = PagedKV | SlotKV


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One checked call: what an implementation's ``run`` gets. Shapes are those of ``verify_attention``.

    ``draft_k``/``draft_v`` are set for draft_kv (draft_v None for latent attention); ``scale`` is resolved; ``out`` and
    ``lse`` are where results go (``lse`` None: not wanted). ``k_scale``/``v_scale`` are floats or one-element tensors.
    """

    request: VerifyRequest
    q: torch.Tensor
    kv: KVCache
    cu_seqlens_q: torch.Tensor
    max_query_len: int
    draft_k: torch.Tensor | None
    draft_v: torch.Tensor | None
    draft_slots: torch.Tensor | None
    mask: TreeMask | None
    scale: float
    softcap: float
    window: int | None
    sinks: torch.Tensor | None
    positions: torch.Tensor | None
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None


def resolve(
    q: torch.Tensor,
    kv: KVCache,
    *,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    draft_kv: Sequence[torch.Tensor | None] | None = None,
    draft_slots: torch.Tensor | None = None,
    mask: TreeMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Call:
    """Check a call's arguments against each other and allocate what the caller did not give. Arguments: see op.py."""
    if not isinstance(kv, (PagedKV, SlotKV)):
        raise TypeError(f"kv must be a PagedKV or a SlotKV, got {type(kv).__name__}")
    k = kv.k
    _check("q", q, 3, _QUERY_DTYPES, k, shape="[T, Hq, Dk]")
    tokens, heads, head_dim = q.shape
    kv_heads, requests, latent = k.shape[-2], kv.num_requests, kv.v is None
    v_head_dim = kv.v_head_dim if kv.v is None else kv.v.shape[-1]
    assert v_head_dim is not None  # the cache's constructor saw to it
    if head_dim != k.shape[-1]:
        raise ValueError(f"q has head dimension {head_dim}, the cache's k has {k.shape[-1]}: they must be equal")
    if not heads:
        raise ValueError(f"q must have at least one head, got shape {tuple(q.shape)}")
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, which is no multiple of the cache's {kv_heads} KV heads")
    if k.dtype != q.dtype and k.dtype in _QUERY_DTYPES:
        raise TypeError(f"the cache is {k.dtype}, q is {q.dtype}: a cache has q's dtype or is float8_e4m3fn or float8_e5m2")

    _check("cu_seqlens_q", cu_seqlens_q, 1, _INTS, q, shape="[R + 1]")
    if cu_seqlens_q.shape[0] != requests + 1:
        raise ValueError(f"cu_seqlens_q has {cu_seqlens_q.shape[0]} entries, kv lists {requests} requests: it needs {requests + 1}")
    max_query_len = _host_int("max_query_len", max_query_len)

    draft_k = draft_v = None
    if draft_kv is not None:
        if draft_slots is not None:
            raise ValueError("draft_kv and draft_slots are both given: the draft tokens are in one place, leave the other out")
        draft_k, draft_v = _check_draft(draft_kv, q, kv_heads, v_head_dim, latent)
    if draft_slots is not None:
        _check("draft_slots", draft_slots, 1, _INTS, q, shape="[T]")
        _check_rows("draft_slots", draft_slots, tokens)

    if positions is not None:
        _check("positions", positions, 1, _INTS, q, shape="[T]")
        _check_rows("positions", positions, tokens)
    if window is not None:
        window = min(_host_int("window", window), _WIDEST_WINDOW)
    if mask is not None:
        _check_mask(mask, q, requests, max_query_len)
        if window is not None and positions is None:
            raise ValueError("window with a TreeMask needs positions: siblings of a tree share one, so rows do not tell them")
    if sinks is not None:
        _check("sinks", sinks, 1, _FLOATS, q, shape="[Hq]")
        if sinks.shape[0] != heads:
            raise ValueError(f"sinks has {sinks.shape[0]} entries, q has {heads} heads: it needs one per head")

    scale = head_dim**-0.5 if scale is None else _host_float("scale", scale)
    softcap = _host_float("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (none) or more, got {softcap}")
    _check_scale("k_scale", k_scale, q)
    _check_scale("v_scale", v_scale, q)
    if latent and (isinstance(v_scale, torch.Tensor) or v_scale != 1.0):
        raise ValueError(f"v_scale must be 1.0 for a latent cache, where k_scale serves K and V, got {v_scale}")
    if isinstance(k_scale, torch.Tensor):
        scales = "device" if latent or isinstance(v_scale, torch.Tensor) else "device_k"
    elif isinstance(v_scale, torch.Tensor):
        scales = "device_v"
    else:
        scales = "none" if k_scale == 1.0 and v_scale == 1.0 else "host"

    indices = (
        ("cu_seqlens_q", cu_seqlens_q),
        ("kv_lens", kv.kv_lens if isinstance(kv, PagedKV) else kv.indptr),
        ("indices", kv.block_table if isinstance(kv, PagedKV) else kv.indices),
        ("kv_start", kv.kv_start),
        ("draft_slots", draft_slots),
        ("mask_indptr", None if mask is None else mask.indptr),
        ("positions", positions),
    )
    request = _request(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=DTYPE_NAMES[q.dtype],
        kv_dtype=DTYPE_NAMES[k.dtype],
        num_requests=requests,
        max_query_len=max_query_len,
        kv_layout=kv.layout,
        page_size=kv.page_size,
        max_kv_len=kv.max_kv_len,
        latent=latent,
        draft="dense" if draft_k is not None else "slots" if draft_slots is not None else "cache",
        mask=None if mask is None else mask.layout,
        mask_indptr=mask is not None and mask.indptr is not None,
        window=window,
        positions=positions is not None,
        kv_start=kv.kv_start is not None,
        sinks=sinks is not None,
        softcap=softcap != 0.0,
        return_lse=bool(return_lse),
        scales=scales,
        int64=tuple([name for name, tensor in indices if tensor is not None and tensor.dtype == torch.int64]),
        aligned=aligned(k) and (kv.v is None or aligned(kv.v)),
    )
    if out is None:
        out = torch.empty(tokens, heads, v_head_dim, dtype=q.dtype, device=q.device)
    else:
        _check("out", out, 3, (q.dtype,), q, shape="[T, Hq, Dv]")
        if tuple(out.shape) != (tokens, heads, v_head_dim):
            raise ValueError(f"out has shape {tuple(out.shape)}, it needs [T, Hq, Dv] = {(tokens, heads, v_head_dim)}")
        if 0 in out.stride() and any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
            raise ValueError(f"out has strides {out.stride()}: its rows share memory, give one that was not made by expand()")
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device) if return_lse else None
    return Call(
        request, q, kv, cu_seqlens_q, max_query_len, draft_k, draft_v, draft_slots, mask, scale, softcap, window, sinks,
        positions, k_scale, v_scale, out, lse,
    )  # fmt: skip


def _check(name: str, tensor: torch.Tensor, dim: int, dtypes: tuple[torch.dtype, ...], like: torch.Tensor | None, *, shape: str) -> None:
    """A tensor with ``dim`` dimensions, one of ``dtypes``, contiguous in the last dimension, on ``like``'s device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor {shape}, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}, accepted: {', '.join(str(d) for d in dtypes)}")
    if tensor.dim() != dim:
        raise ValueError(f"{name} must be {shape}, got shape {tuple(tensor.shape)}")
    if tensor.stride()[-1] != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}: call .contiguous()")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, the other tensors are on {like.device}: move it there")


def _check_cache(k: torch.Tensor, v: torch.Tensor | None, v_head_dim: int | None, shape: str) -> None:
    _check("k", k, shape.count(",") + 1, tuple(DTYPE_NAMES), None, shape=shape)
    if k.shape[-1] < 1 or k.shape[-2] < 1:
        raise ValueError(f"k must have at least one KV head and one column, got shape {tuple(k.shape)}")
    if v is not None:
        _check("v", v, k.dim(), (k.dtype,), k, shape=shape.replace("Dk", "Dv"))
        if v.shape[:-1] != k.shape[:-1] or v.shape[-1] < 1:
            raise ValueError(f"v has shape {tuple(v.shape)}, k {tuple(k.shape)}: they may differ in the last dimension alone")
        if v_head_dim is not None and v_head_dim != v.shape[-1]:
            raise ValueError(f"v_head_dim is {v_head_dim}, v has {v.shape[-1]} columns: leave v_head_dim out when v is given")
        return
    if v_head_dim is None:
        raise ValueError("v is None (a latent cache) and v_head_dim is not given: say how many columns of k are V")
    if isinstance(v_head_dim, bool) or not isinstance(v_head_dim, int) or not 1 <= v_head_dim <= k.shape[-1]:
        raise ValueError(f"v_head_dim must be an integer from 1 to k's {k.shape[-1]} columns, got {v_head_dim!r}")
    if k.shape[-2] != 1:
        raise ValueError(f"a latent cache (v None) has one KV head, k has {k.shape[-2]}: give v, or k with Hkv = 1")


def _check_start(kv_start: torch.Tensor | None, requests: int, like: torch.Tensor) -> None:
    if kv_start is not None:
        _check("kv_start", kv_start, 1, _INTS, like, shape="[R]")
        if kv_start.shape[0] != requests:
            raise ValueError(f"kv_start has {kv_start.shape[0]} entries, it needs one for each of the {requests} requests")


def _check_draft(
    draft_kv: Sequence[torch.Tensor | None], q: torch.Tensor, kv_heads: int, v_head_dim: int, latent: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not isinstance(draft_kv, (tuple, list)) or len(draft_kv) != 2:
        raise TypeError(f"draft_kv must be a pair (k, v), got {type(draft_kv).__name__}")
    k, v = draft_kv
    wanted = [("draft_kv's k", k, q.shape[-1])]
    if v is not None:
        wanted.append(("draft_kv's v", v, v_head_dim))
    elif not latent:
        raise ValueError("draft_kv's v is None, which only a latent cache (v None) allows: give v [T, Hkv, Dv]")
    for name, tensor, width in wanted:
        _check(name, tensor, 3, (q.dtype,), q, shape="[T, Hkv, D]")  # type: ignore[arg-type]  # None is a TypeError there
        if tuple(tensor.shape) != (q.shape[0], kv_heads, width):  # type: ignore[union-attr]
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, it needs [T, Hkv, D] = {(q.shape[0], kv_heads, width)}")  # type: ignore[union-attr]
    assert k is not None
    return k, None if latent else v


def aligned(cache: torch.Tensor) -> bool:
    """Whether the address is a multiple of 16 bytes and the strides of 16 elements: what Triton tells a kernel of alignment.

    The stride of a head counts where there is more than one.
    """
    strides = cache.stride()[:-2] if cache.shape[-2] == 1 else cache.stride()[:-1]
    return cache.data_ptr() % 16 == 0 and math.gcd(*strides) % 16 == 0


def _check_rows(name: str, tensor: torch.Tensor, tokens: int) -> None:
    if tensor.shape[0] != tokens:
        raise ValueError(f"{name} has {tensor.shape[0]} entries, q has {tokens} rows: it needs one for each")


def _check_mask(mask: TreeMask, q: torch.Tensor, requests: int, max_query_len: int) -> None:
    if not isinstance(mask, TreeMask):
        raise TypeError(f"mask must be a TreeMask or None (a causal chain), got {type(mask).__name__}")
    data, shape = mask.data, tuple(mask.data.shape)
    if data.device != q.device:
        raise ValueError(f"mask's data is on {data.device}, the other tensors are on {q.device}: move it there")
    if mask.indptr is not None:
        if mask.indptr.shape[0] not in (requests, requests + 1):
            raise ValueError(f"mask's indptr has {mask.indptr.shape[0]} entries, it needs {requests} or {requests + 1}")
    elif mask.layout == "qlen":
        if data.dim() == 3 and (shape[0] < requests or shape[1:] != (max_query_len, max_query_len)):
            raise ValueError(
                f"mask's data has shape {shape}, it needs [R, L, L] = {(requests, max_query_len, max_query_len)} or more requests"
            )
        if data.numel() < requests * max_query_len**2:
            raise ValueError(f"mask's data has {data.numel()} entries, it needs R * max_query_len**2 = {requests * max_query_len**2}")
    if mask.layout == "packed":
        _check_rows("mask's data", data, q.shape[0])
        words = -(-max_query_len // 64)
        if shape[1] < words:
            raise ValueError(f"mask's data has {shape[1]} words a row, max_query_len {max_query_len} needs {words}")


def _check_scale(name: str, value: float | torch.Tensor, q: torch.Tensor) -> None:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.dtype not in _FLOATS:
            raise ValueError(f"{name} must be a float or a floating tensor of one element, got {value.dtype} of shape {tuple(value.shape)}")
        if value.device != q.device:
            raise ValueError(f"{name} is on {value.device}, the other tensors are on {q.device}: move it there, or pass a float")
    else:
        _host_float(name, value)


def _host_float(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (float, int, numbers.Real)):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)


def _host_int(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, numbers.Integral)):  # NumPy's integers are fine
        raise TypeError(f"{name} must be an integer on the host, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} must be 0 or more, got {value}")
    return int(value)
