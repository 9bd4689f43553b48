"""SGLang's metadata in the op's words. No attention arithmetic; nothing here imports SGLang, so it is tested without it.

``extend`` and ``decode`` read calls of the triton backend's ``extend_attention_fwd`` and ``decode_attention_fwd``, ``paged`` one of the
fa3 backend's ``flash_attn_with_kvcache``. Each gives a :class:`Batch`, or the code of the reason why the engine's own kernel keeps the
call, for the counters:

non_causal (no mask, and every token sees all), score_mod, xai_temperature, argument (one that we do not know), partial
(attention over a part of the keys), query_dtype, draft_dtype (K/V of the draft tokens read back from an fp8 cache),
kv_layout, scales (a latent cache with different ones for K and V), window (its key lists are missing), positions (a tree
with a window needs them), max_query_len.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashmap.adapters.serving import Batch
from flashmap.core.inputs import PagedKV, SlotKV, TreeMask

_QUERY = (torch.float32, torch.float16, torch.bfloat16)


# -- triton: the prefix as lists of token slots, the draft tokens' K and V beside it -------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Extend:
    """The arguments of ``extend_attention_fwd``, under the engine's names; ``other`` are those that we do not know."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor | None
    custom_mask: torch.Tensor | None
    is_causal: bool
    mask_indptr: torch.Tensor | None
    max_len_extend: int
    k_scale: float
    v_scale: float
    sm_scale: float | None
    logit_cap: float
    sliding_window_size: int
    sinks: torch.Tensor | None
    window_kv_offsets: torch.Tensor | None
    xai_temperature_len: int
    score_mod: Any
    other: Mapping[str, Any]


def extend(call: Extend, *, chain: bool, mask_layout: str, positions: torch.Tensor | None) -> Batch | str:
    """``chain``: the mask, if there is one, is that of a chain and need not be read. ``mask_layout``: "full" or "qlen"."""
    masked = call.custom_mask is not None and not chain
    code = _extend_reason(call, masked)
    if code is not None:
        return code
    requests = call.qo_indptr.shape[0] - 1
    assert call.kv_indices is not None
    latent = _is_latent(call.k_buffer, call.v_buffer)
    offsets, window = call.window_kv_offsets, call.sliding_window_size if call.sliding_window_size > 0 else None
    kv = SlotKV(
        call.k_buffer,
        None if latent else call.v_buffer,
        call.kv_indptr[: requests + 1],
        call.kv_indices,
        v_head_dim=call.v_buffer.shape[-1] if latent else None,
        kv_start=None if offsets is None else offsets[:requests],
    )
    mask = None
    if masked:
        assert call.custom_mask is not None
        mask = TreeMask(call.custom_mask, mask_layout, call.mask_indptr if mask_layout == "full" else None)
        if window is not None and positions is None:
            return "positions"
    return Batch(
        call.q,
        kv,
        {
            "cu_seqlens_q": call.qo_indptr,
            "max_query_len": call.max_len_extend,
            "draft_kv": (call.k, None if latent else call.v),
            "mask": mask,
            "scale": call.sm_scale or None,
            "softcap": max(float(call.logit_cap or 0.0), 0.0),
            "window": window,
            "sinks": call.sinks,
            "positions": positions if mask is not None and window is not None else None,
            "k_scale": call.k_scale,
            "v_scale": 1.0 if latent else call.v_scale,
        },
    )


def _extend_reason(call: Extend, masked: bool) -> str | None:
    if call.other:
        return "partial" if call.other.keys() & {"lse_extend", "skip_prefix", "skip_extend"} else "argument"
    if call.score_mod is not None:
        return "score_mod"
    if call.xai_temperature_len > 0:
        return "xai_temperature"
    if not call.is_causal and not masked:
        return "non_causal"
    if call.q.dtype not in _QUERY:
        return "query_dtype"
    if call.k.dtype != call.q.dtype:
        return "draft_dtype"
    if call.k_buffer.dim() != 3:
        return "kv_layout"
    if call.kv_indices is None:
        return "window"
    return "scales" if _is_latent(call.k_buffer, call.v_buffer) and call.k_scale != call.v_scale else None


# Of ``decode_attention_fwd``, in its order; and how 0.5.23 tells it to run, which is its own affair.
DECODE_PARAMETERS = (
    "q", "k_buffer", "v_buffer", "o", "kv_indptr", "kv_indices", "attn_logits", "attn_lse", "num_kv_splits", "max_kv_splits", "sm_scale",
    "k_scale", "v_scale", "logit_cap", "sinks", "xai_temperature_len", "has_mla", "use_pdl", "page_size", "score_mod", "aux_tensors",
)  # fmt: skip
_LEAN = {"enable_lean", "lean_Mp", "lean_Lp", "lean_Op", "lean_locks", "uneven_batch"}


def decode(call: Mapping[str, Any], cu_seqlens_q: torch.Tensor) -> Batch | str:
    """``call``: the arguments of ``decode_attention_fwd``; ``cu_seqlens_q`` [T + 1]: each of its T tokens is a request.

    A key list has its token as the last one. On layers with a window it has no other keys than those.
    """
    q, k, v = call["q"], call["k_buffer"], call["v_buffer"]
    if call.get("score_mod") is not None:
        return "score_mod"
    if any(value is not None for name, value in call.items() if name not in DECODE_PARAMETERS and name not in _LEAN):
        return "argument"
    if (call.get("xai_temperature_len") or -1) > 0:
        return "xai_temperature"
    if q.dtype not in _QUERY:
        return "query_dtype"
    if k.dim() != 3:
        return "kv_layout"
    if call["kv_indices"] is None:
        return "window"
    latent, k_scale, v_scale = _is_latent(k, v), call["k_scale"], call["v_scale"]
    if latent and k_scale != v_scale:
        return "scales"
    kv = SlotKV(
        k,
        None if latent else v,
        call["kv_indptr"][: len(cu_seqlens_q)],
        call["kv_indices"],
        v_head_dim=v.shape[-1] if latent else None,
    )
    return Batch(
        q,
        kv,
        {
            "cu_seqlens_q": cu_seqlens_q,
            "max_query_len": 1,
            "scale": call["sm_scale"] or None,
            "softcap": max(float(call.get("logit_cap") or 0.0), 0.0),
            "sinks": call.get("sinks"),
            "k_scale": k_scale,
            "v_scale": 1.0 if latent else v_scale,
        },
    )


def _is_latent(k_buffer: torch.Tensor, v_buffer: torch.Tensor) -> bool:
    """Whether V is the first columns of K: the same memory, row by row."""
    return k_buffer.data_ptr() == v_buffer.data_ptr() and k_buffer.shape[-2] == 1 and k_buffer.stride(0) == v_buffer.stride(0)


# -- fa3: everything in the cache, by pages ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A step's trees, as the op takes them: ``slots`` int32 [R * L] and ``mask`` [R, L, L], in the same order."""

    slots: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, page_table: torch.Tensor, lens: torch.Tensor) -> Tree:
        """From the fa3 backend's table of a tree: row t lists the slots of its request's draft tokens, int32 [R * L, L], those
        that token t sees first, ``lens`` [R * L] in number.

        The first row's order is taken for all rows of the request. Runs on the device alone.
        """
        width = page_table.shape[1]
        table = page_table.view(-1, width, width)
        slots = table[:, 0]
        seen = torch.arange(width, device=lens.device) < lens.view(-1, width, 1)
        listed = table.unsqueeze(-2) == slots[:, None, :, None]
        return cls(slots.reshape(-1), (listed & seen.unsqueeze(-2)).any(-1))


# What may be in the engine's call besides what _paged reads, with the values at which it changes nothing.
_PLAIN = {"cu_seqlens_k_new", "num_splits", "ver", "out", "return_softmax_lse", "max_seqlen_k"}


def paged(call: Mapping[str, Any], tree: Tree | None) -> Batch | str:
    """``call``: the keyword arguments of ``flash_attn_with_kvcache``; with a ``tree`` they list the prefix alone."""
    q, k, v, qv = call["q"], call["k_cache"], call["v_cache"], call.get("qv")
    code = _paged_reason(call, tree)
    if code is not None:
        return code
    if qv is None:
        kv = PagedKV(k, v, call["page_table"], call["cache_seqlens"])
    else:
        latent = _joined(v, k)
        if latent is None:
            return "kv_layout"
        q = _joined(qv, q)
        q = torch.cat((qv, call["q"]), dim=-1) if q is None else q
        kv = PagedKV(latent, None, call["page_table"], call["cache_seqlens"], v_head_dim=v.shape[-1])
    window = call.get("window_size", (-1, -1))[0]
    return Batch(
        q,
        kv,
        {
            "cu_seqlens_q": call["cu_seqlens_q"],
            "max_query_len": call["max_seqlen_q"],
            "draft_slots": None if tree is None else tree.slots,
            "mask": None if tree is None else TreeMask(tree.mask, "qlen"),
            "scale": call["softmax_scale"],
            "softcap": float(call.get("softcap") or 0.0),
            "window": window if window >= 0 else None,
            "sinks": call.get("sinks"),
        },
    )


_READ = {
    "q", "k_cache", "v_cache", "qv", "page_table", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q", "softmax_scale",
    "causal", "window_size", "softcap", "sinks", "k_descale", "v_descale", "score_mod",
}  # fmt: skip


def _paged_reason(call: Mapping[str, Any], tree: Tree | None) -> str | None:
    if call.get("score_mod") is not None:
        return "score_mod"
    if any(value is not None for name, value in call.items() if name not in _PLAIN | _READ):
        return "argument"
    if tree is None and not call["causal"]:
        return "non_causal"
    if call["q"].dtype not in _QUERY:
        return "query_dtype"  # the engine casts q to the fp8 of its cache, and its kernel multiplies in fp8
    if call.get("k_descale") is not None or call.get("v_descale") is not None:
        return "scales"
    if call["k_cache"].dim() != 4:
        return "kv_layout"
    if not isinstance(call["max_seqlen_q"], int):
        return "max_query_len"
    return "window" if tree is not None and call.get("window_size", (-1, -1))[0] >= 0 else None


def _joined(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """[..., A] and [..., B] as one [..., A + B], if they are neighbouring columns of the same memory."""
    width = left.shape[-1] + right.shape[-1]
    if left.dtype != right.dtype or left.shape[:-1] != right.shape[:-1]:
        return None
    if left.data_ptr() + left.shape[-1] * left.element_size() != right.data_ptr():
        return None
    if left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr():
        return None
    steps = [(a, b) for a, b, n in zip(left.stride()[:-1], right.stride()[:-1], left.shape[:-1], strict=True) if n > 1]
    if any(a != b or a < width for a, b in steps):  # a dimension of size 1 may have any stride
        return None
    return left.as_strided((*left.shape[:-1], width), left.stride())
