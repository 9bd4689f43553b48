"""``flashinfer``: a whole call by FlashInfer's paged wrappers, where the environment has FlashInfer 0.6.

Chains and trees of GQA by ``BatchPrefillWithPagedKVCacheWrapper`` (its fa2 kernels, the ones that take a mask), chains of MLA by
``BatchMLAPagedAttentionWrapper``. FlashInfer shares the work out on the host, and the kernels' grid follows from that: a graph would
keep the shares of the lengths that it was captured with. So a call waits for the device once, to read its lengths (and where
FlashInfer packs a mask again), and is declined while a graph is captured. It runs only when it is named.

What FlashInfer's kernels read, in 0.6.14 (include/flashinfer/attention/prefill.cuh, mla.cuh and mla_hopper.cuh): no row behind a
request's last key, and no page behind its last page. In shared memory such a row of V, or of a latent, is zeros
(``SharedMemFillMode::kFillZero``), so that its weight of 0 meets no NaN. Such a row of K is whatever was there (``kNoFill``); its
logits are replaced, not added to (``logits_mask``). A tile that reaches past the end of a split holds keys that are listed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module, util
from itertools import accumulate
from typing import Any

import torch

from flashmap.core.implementations.probing import Attend, Found, failed, once
from flashmap.core.implementations.torch_shared import Lengths, check_rows, lengths_of, visible
from flashmap.core.inputs import Call, PagedKV
from flashmap.core.interface import Capability, Declined, Implementation, Reason
from flashmap.core.request import DeviceInfo, VerifyRequest

logger = logging.getLogger(__name__)
_MIN_CAPABILITY = (8, 0)
_HEAD_DIMS = (64, 128, 256)  # page_produce_kv copies 64 columns at a time
_LATENT = (576, 512)
_ROW_TILE = 128  # packed rows that two MLA blocks share, and the most of a prefill block
_MAX_WORKS = 16000  # of the 16384 that MLAPlan has room for, less a split or two for each SM; it does not check
_LEAST_SCALE = 2.0**-10


@dataclass(frozen=True)
class FlashInfer(Implementation):
    """``find``: the kernels for a latent cache or for another one, as this process has them; tests give others."""

    find: Callable[[bool, DeviceInfo], Found] = field(kw_only=True)
    slow_to_ask = True  # FlashInfer compiles its kernels where they are first needed

    def why_not(self, request: VerifyRequest, device: DeviceInfo) -> tuple[Reason, ...]:
        found = [*self.capability.why_not(request, device), *_shape(request)]
        if device.type in self.capability.devices and (device.type != "cuda" or device.capability >= _MIN_CAPABILITY):
            found += self.find(request.latent, device).reasons
        return tuple(found)

    @torch.no_grad()
    def run(self, call: Call) -> None:
        found = self.find(call.request.latent, DeviceInfo.of(call.q.device))
        if found.attend is None:  # why_not() said so to whoever asked
            raise Declined(self.name, found.reasons)
        lengths = lengths_of(call)
        starts, rows, keys = torch.stack((call.cu_seqlens_q[:-1].long(), lengths.rows, lengths.listed)).tolist()
        check_rows(call, rows)
        short = any(n > listed for n, listed in zip(rows, keys, strict=True))
        # FlashInfer's own window is of the positions that a chain has when all of it is in the cache.
        masked = call.mask is not None or (call.window is not None and (call.positions is not None or short))
        parts = [part for r in range(len(rows)) for part in _parts(starts[r], rows[r], r, keys[r], masked=masked)]
        if sum(part.rows for part in parts) < sum(rows):  # some have no key at all
            _see_nothing(call, slice(starts[0], starts[0] + sum(rows)))
        if parts:
            _attend(call, found.attend, parts, lengths, masked=masked)


def _shape(request: VerifyRequest) -> tuple[Reason, ...]:
    """What the kernels do not take of the heads, the features together with a latent cache, and the sizes."""
    found, dims = [], (request.head_dim, request.v_head_dim)
    tokens = request.num_requests * request.max_query_len
    if dims != _LATENT if request.latent else dims[0] != dims[1] or dims[0] not in _HEAD_DIMS:
        text = f"head dimensions {dims[0]}/{dims[1]} are not served: {', '.join(map(str, _HEAD_DIMS))}, or for a latent cache 576/512"
        found.append(Reason("head_dim", text))
    if not request.aligned:
        found.append(Reason("alignment", "the cache's strides or addresses are no multiples of 16: FlashInfer copies 16 bytes at once"))
    if request.latent:
        for feature in ("tree", "window", "softcap"):
            if feature in request.features():
                found.append(Reason(f"feature.{feature}", f"FlashInfer's MLA kernels have no {feature}: chains alone are served"))
        if _ROW_TILE % request.heads:  # the causal bound of a block's keys is rounded down to whole tokens
            found.append(Reason("heads", f"{request.heads} heads: FlashInfer's MLA kernels miss keys unless they divide {_ROW_TILE}"))
        if tokens * -(-request.heads // 64) > _MAX_WORKS:
            text = f"{request.num_requests} requests of {request.max_query_len} query tokens are more than FlashInfer's MLA plan holds"
            found.append(Reason("batch", text))
    elif (request.mask is not None or request.window is not None) and tokens * (request.max_kv_len or 0) >= 2**31:
        text = f"a mask of {tokens} query tokens by up to {request.max_kv_len} keys has more bits than FlashInfer's 32-bit offsets reach"
        found.append(Reason("mask_size", text))
    return tuple(found)


# -- a call as FlashInfer takes it -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """``rows`` rows of q from ``row`` on, and the first ``keys`` keys of ``request``. With no mask, the last row sees them all."""

    row: int
    rows: int
    request: int
    keys: int


@dataclass(frozen=True, slots=True)
class _Work:
    """``q`` [rows, Hq, Dk] is contiguous. int32 on the host: ``row_starts`` and ``page_starts`` [parts + 1], ``keys`` [parts];
    on the device ``pages``, one after another. ``mask`` bool, flat, [rows, keys] of each part in turn; None: causal."""

    q: torch.Tensor
    scale: float
    row_starts: torch.Tensor
    page_starts: torch.Tensor
    pages: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None


def _parts(row: int, rows: int, request: int, keys: int, *, masked: bool) -> list[_Part]:
    """FlashInfer lays a chain's last token on the last key, the op its first on the first after the prefix. That differs where fewer
    keys are listed than tokens: the tokens behind them see all of them, each as a part of its own."""
    if not rows or not keys:  # in no plan: a mask's offsets get wrong by such a part, and MLA's blocks by the average of rows
        return []
    if masked or keys >= rows:
        return [_Part(row, rows, request, keys)]
    return [_Part(row, keys, request, keys), *(_Part(row + t, 1, request, keys) for t in range(keys, rows))]


def _attend(call: Call, attend: Attend, parts: Sequence[_Part], lengths: Lengths, *, masked: bool) -> None:
    assert isinstance(call.kv, PagedKV)  # why_not() declines slot lists
    device, page_size = call.q.device, call.kv.page_size
    rows = torch.tensor([row for part in parts for row in range(part.row, part.row + part.rows)], device=device)
    page_starts = _starts([-(-part.keys // page_size) for part in parts])
    total, starts = int(page_starts[-1]), page_starts.to(device)
    owner = torch.arange(len(parts), device=device).repeat_interleave(starts.diff(), output_size=total)
    column = torch.arange(total, device=device) - starts[owner]
    requests = [part.request for part in parts]
    pages = call.kv.block_table[torch.tensor(requests, device=device)[owner], column]
    sizes, keys = [part.rows for part in parts], [part.keys for part in parts]
    sees = visible(call, lengths, requests, sizes, keys) if masked else []
    mask = torch.cat([block.flatten() for block in sees]) if masked else None
    q, scale = _above_zero(call.q[rows], call.scale)
    work = _Work(q, scale, _starts(sizes), page_starts, pages, torch.tensor(keys, dtype=torch.int32), mask)
    out, lse = attend(call=call, work=work)
    call.out[rows] = out
    if call.lse is not None:
        call.lse[rows] = lse * math.log(2)  # FlashInfer's is in base 2
    if masked:  # a row that sees nothing has equal logits there, and so the mean of its keys
        _see_nothing(call, rows[~torch.cat([block.any(1) for block in sees])])


def _starts(sizes: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)


def _above_zero(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Queries and a scale that give the same logits: FlashInfer takes the largest logit before it scales it, and a masked one is
    -5e4 there, which a small scale would make a weight of."""
    if abs(scale) < _LEAST_SCALE:
        return q * scale, 1.0
    return (q, scale) if scale > 0 else (-q, -scale)


def _see_nothing(call: Call, rows: slice | torch.Tensor) -> None:
    call.out[rows] = 0.0
    if call.lse is not None:
        call.lse[rows] = -math.inf


# -- FlashInfer's wrappers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wrapped:
    """Attention by one of FlashInfer's wrappers: ``make(workspace)`` gives one. It is kept for its device and stream, and replaced
    where more room is needed.

    A plan writes into pinned memory whose copy to the device the next plan must not overtake. It does not: between the two a call
    has waited for the stream to read its lengths.
    """

    make: Callable[[torch.Tensor], Any]
    kept: dict[tuple[torch.device, int], tuple[int, Any]] = field(default_factory=dict)

    def take(self, device: torch.device, bytes_per_sm: int) -> Any:
        key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
        size = DeviceInfo.of(device).sm_count * bytes_per_sm + (1 << 20)  # and what aligning takes
        if key not in self.kept or self.kept[key][0] < size:
            self.kept[key] = (size, self.make(torch.empty(size, dtype=torch.uint8, device=device)))
        return self.kept[key][1]


class Paged(_Wrapped):
    """``make``: a BatchPrefillWithPagedKVCacheWrapper."""

    def __call__(self, *, call: Call, work: _Work) -> tuple[torch.Tensor, torch.Tensor]:
        request, pages, masked = call.request, work.pages, work.mask is not None
        k, v = call.kv.k, call.kv.v
        assert v is not None
        if k.stride() != v.stride():  # FlashInfer has one set of strides for both
            both = torch.cat((k[pages.long()], v[pages.long()]), -1)
            k, v = both[..., : request.head_dim], both[..., request.head_dim :]
            pages = torch.arange(len(pages), dtype=torch.int32, device=pages.device)
        # PrefillPlan: a partial result in fp32, and its log-sum-exp, for each of two blocks an SM.
        wrapper = self.take(work.q.device, 2 * request.group * _ROW_TILE * (request.head_dim + 1) * 4)
        # It packs a mask on the device, and wants the offsets there; of a packed_custom_mask it takes them as bytes for bits.
        where = work.q.device if masked else "cpu"
        wrapper.plan(
            qo_indptr=work.row_starts.to(where), paged_kv_indptr=work.page_starts.to(where), paged_kv_indices=pages,
            paged_kv_last_page_len=((work.keys - 1) % request.page_size + 1).to(where), num_qo_heads=request.heads,
            num_kv_heads=request.kv_heads, head_dim_qk=request.head_dim, page_size=request.page_size, custom_mask=work.mask,
            causal=not masked, sm_scale=work.scale, window_left=-1 if call.window is None or masked else call.window,
            logits_soft_cap=call.softcap, q_data_type=work.q.dtype, kv_data_type=k.dtype,
        )  # fmt: skip
        out, lse = wrapper.run(work.q, (k, v), return_lse=True)
        return out, lse


class Latent(_Wrapped):
    """``make``: a BatchMLAPagedAttentionWrapper."""

    def __call__(self, *, call: Call, work: _Work) -> tuple[torch.Tensor, torch.Tensor]:
        request, cache, width = call.request, call.kv.k[:, :, 0], _LATENT[1]
        # MLAPlan: two partial results in 16 bits, and their log-sum-exps, for each of 64 rows an SM.
        wrapper = self.take(work.q.device, 2 * 64 * (2 * width + 4))
        wrapper.plan(
            qo_indptr=work.row_starts, kv_indptr=work.page_starts, kv_indices=work.pages, kv_len_arr=work.keys,
            num_heads=request.heads, head_dim_ckv=width, head_dim_kpe=request.head_dim - width, page_size=request.page_size,
            causal=True, sm_scale=work.scale, q_data_type=work.q.dtype, kv_data_type=cache.dtype,
        )  # fmt: skip
        out, lse = wrapper.run(work.q[..., :width], work.q[..., width:], cache[..., :width], cache[..., width:], return_lse=True)
        return out, lse


# -- whether it is here --------------------------------------------------------------------------------------------------------


def find(latent: bool, device: DeviceInfo) -> Found:
    return once(f"FlashInfer's {_NAMES[latent]}", partial(look, latent), lambda capability: capability >= _MIN_CAPABILITY, device)


_NAMES = {False: "BatchPrefillWithPagedKVCacheWrapper", True: "BatchMLAPagedAttentionWrapper"}
_PROBED: dict[bool, dict[str, Any]] = {
    False: {"heads": 8, "kv_heads": 2, "head_dim": 128},
    True: {"heads": 16, "kv_heads": 1, "head_dim": _LATENT[0], "v_head_dim": _LATENT[1], "latent": True},
}
_PROBED_LENS: dict[str, Any] = {"query_lens": (5, 0, 8, 4, 4), "prefix_lens": (900, 4, 0, 70, -2)}


def look(latent: bool, device: torch.device) -> Found:
    """Imports FlashInfer and runs it on cases of the conformance kit, with NaN behind every request's last key. The first time on a
    machine FlashInfer compiles its kernels for that, which takes a minute or two."""
    from flashmap.core.testing import Case, check_case

    name = _NAMES[latent]
    try:
        if util.find_spec("flashinfer") is None:
            return Found(None, (Reason("library", "FlashInfer is not here: no package flashinfer", "install flashinfer-python"),))
        wrapper = getattr(import_module("flashinfer"), name)
        # MLA's kernels: fa3 on Hopper, fa2 elsewhere
        attend = Latent(partial(wrapper, backend="auto")) if latent else Paged(partial(wrapper, kv_layout="NHD", backend="fa2"))
        for mask in (None,) if latent else (None, "packed"):
            case = Case(mask or "chain", **_PROBED[latent], **_PROBED_LENS, dtype="bf16", mask=mask, lse=True)
            result = check_case(replace(IMPLEMENTATION, find=lambda latent, device: Found(attend)), case, device)
            if result.outcome != "ok":
                return Found(None, (Reason("library_probe", f"FlashInfer's {name} gave a wrong answer: {result}"),))
    except Exception as error:
        return Found(None, (failed(f"FlashInfer's {name}", error),))
    logger.info("flashmap: FlashInfer's %s is here and gives right answers", name)
    return Found(attend)


IMPLEMENTATION = FlashInfer(
    "flashinfer",
    Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"fp16", "bf16"}),
        kv_dtypes=frozenset({"fp16", "bf16"}),
        min_capability=_MIN_CAPABILITY,
        features=frozenset({"tree", "latent", "window", "positions", "kv_start", "softcap", "lse"}),
    ),
    find=find,
)
