"""FlashAttention 3 and FlashMLA, if this environment has them: found, their parameters checked, and tried on a known answer.

``fa3`` and ``flashmla`` look once a process and never while a graph is captured. A library is loaded from its file: importing
the engine that ships it would take seconds and set the engine up. What is found is called by the names of its parameters, so
that a version with more of them still serves, and one that lacks a needed one is declined.

Sources: the operators' schemas in the wheels of vLLM 0.26.0 and sglang-kernel 0.4.10; flash-attention hopper/flash_api.cpp and
paged_kv.h; FlashMLA csrc/api/dense_decode.h and csrc/sm90/decode/dense/splitkv_mla.cuh.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import torch

from flashmap.core.implementations.probing import Attend, Found, failed, once
from flashmap.core.interface import Reason
from flashmap.core.request import DeviceInfo

# Attend's log-sum-exp: of FA3 [H, T] with out [T, H, Dv], of FlashMLA [R, H, L] with out [R, L, H, Dv].
HOPPER = (9, 0)
logger = logging.getLogger(__name__)


def fa3(device: DeviceInfo) -> Found:
    """FlashAttention 3. ``attend(**FA3_PARAMETERS)``: a paged cache, and q with the rows of all requests."""
    return once("FlashAttention 3", lambda where: search(_FA3, check_fa3, where), _on_hopper, device)


def flashmla(device: DeviceInfo) -> Found:
    """FlashMLA's dense decoding. ``attend(**FLASHMLA_PARAMETERS)``; it plans anew, on the device, in every call."""
    return once("FlashMLA", lambda where: search(_FLASHMLA, check_flashmla, where), _on_hopper, device)


def _on_hopper(capability: tuple[int, int]) -> bool:
    return capability == HOPPER


FA3_PARAMETERS = (
    "q", "k", "v", "q_v", "out", "cu_seqlens_q", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table",
    "leftpad_k", "softmax_scale", "is_causal",
)  # fmt: skip
FLASHMLA_PARAMETERS = ("q", "kcache", "head_size_v", "seqlens_k", "block_table", "softmax_scale", "is_causal")


@dataclass(frozen=True, slots=True)
class _Source:
    """An operator that torch knows once ``files`` of ``package`` are loaded. ``fixed``: the parameters that we leave alone."""

    title: str
    package: str
    files: str
    namespace: str
    operator: str
    parameters: tuple[str, ...]
    fixed: Mapping[str, Any]


_PLAIN = {
    "window_size_left": -1,
    "window_size_right": -1,
    "attention_chunk": 0,
    "softcap": 0.0,
    "is_rotary_interleaved": False,
    "num_splits": 0,  # the library's own bound, from shapes alone; how many it uses it works out from the lengths, on the device
    "sm_margin": 0,
    "only_qv": False,
    "cp_world_size": 1,
    "cp_rank": 0,
}
_FA3 = (
    _Source("vLLM's FlashAttention 3", "vllm", "vllm_flash_attn/_vllm_fa3_C*.so", "_vllm_fa3_C", "fwd", FA3_PARAMETERS, _PLAIN),
    _Source("sgl_kernel's FlashAttention 3", "sgl_kernel", "flash_ops*.so", "sgl_kernel", "fwd", FA3_PARAMETERS, _PLAIN),
)
_FLASHMLA = (
    _Source("vLLM's FlashMLA", "vllm", "_flashmla_C*.so", "_flashmla_C", "dense_decode_fwd", FLASHMLA_PARAMETERS, {}),
    _Source("sgl_kernel's FlashMLA", "sgl_kernel", "flashmla_ops*.so", "sgl_kernel", "dense_decode_fwd", FLASHMLA_PARAMETERS, {}),
)


def search(sources: tuple[_Source, ...], check: Callable[[Attend, torch.device], str | None], device: torch.device) -> Found:
    """The first source that loads, has the parameters and gives the right answer, or the reasons of all."""
    reasons = []
    for source in sources:
        try:
            operator = _load(source)
            if operator is None:
                text = f"{source.title} is not here: no {source.files} in a package {source.package}"
                reasons.append(Reason("library", text, f"install {source.package}"))
                continue
            wrong = unexpected(operator, source.parameters, source.fixed)
            if wrong is not None:
                reasons.append(Reason("library_parameters", f"{source.title} {wrong}"))
                continue
            attend = bound(operator, source.parameters, source.fixed)
            error = check(attend, device)
            if error is None:
                logger.info("flashmap: %s is here and gives right answers", source.title)
                return Found(attend)
            reasons.append(Reason("library_probe", f"{source.title} gave a wrong answer: {error}"))
        except Exception as error:
            reasons.append(failed(source.title, error))
    return Found(None, tuple(reasons))


def _load(source: _Source) -> Any:
    """The operator's overload; loads the library where no import has. None: the package or its file is not there."""
    if _operator(source) is None:
        spec = util.find_spec(source.package)
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        files = sorted(file for folder in folders for file in Path(folder).glob(source.files))
        if not files:
            return None
        torch.ops.load_library(str(files[0]))
    return _operator(source)


def _operator(source: _Source) -> Any:
    packet = getattr(getattr(torch.ops, source.namespace), source.operator, None)
    return None if packet is None else packet.default


def unexpected(operator: Any, parameters: tuple[str, ...], fixed: Mapping[str, Any]) -> str | None:
    """What of the operator's parameters is not as expected: one of ours is missing, or we have no value for one of its own."""
    arguments = operator._schema.arguments
    names = {argument.name for argument in arguments}
    missing = [name for name in parameters if name not in names]
    if missing:
        return f"has no parameter {', '.join(missing)}"
    needed = [
        a.name
        for a in arguments
        if a.name not in parameters and a.name not in fixed and not a.has_default_value() and a.type.kind() != "OptionalType"
    ]
    return f"needs {', '.join(needed)}, which is not known here" if needed else None


def bound(operator: Any, parameters: tuple[str, ...], fixed: Mapping[str, Any]) -> Attend:
    """The operator with the ``parameters`` by name, the others fixed, and its first two results."""
    arguments = operator._schema.arguments
    values = [fixed.get(a.name, a.default_value if a.has_default_value() else None) for a in arguments]
    places = {a.name: i for i, a in enumerate(arguments) if a.name in parameters}

    @torch.no_grad()
    def attend(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        call = values.copy()
        for name, value in given.items():
            call[places[name]] = value
        out, lse, *_ = operator(*call)
        return out, lse

    return attend


# -- known answers ----------------------------------------------------------------------------------------------------------

_LENS = (70, 5)  # keys of two requests: the first reaches into a second page of 64
_ROWS = 5  # query tokens of each; with 16 heads 80 rows, more than the 64 up to which FA3 never copies whole pages
_HEADS = 16
_TOLERANCE = 0.05  # of numbers near 1, in bf16
_SENTINEL = 7.0


def check_fa3(attend: Attend, device: torch.device) -> str | None:
    """Both ways in which it is called, for GQA and MLA, with NaN behind every request's last key. None: right; else what is wrong."""
    ints = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    for title, page, dk, dv in (("GQA", 640, 128, 128), ("MLA", 64, 64, 512)):
        made = torch.Generator().manual_seed(0)
        pages = -(-max(_LENS) // page) + 1
        k, v = (_poisoned(pages, page, d, made, device) for d in (dk, dv))
        q, q_v = (_normal((2 * _ROWS, _HEADS, d), made, device) for d in (dk, dv))
        table = ints([[*range(1, pages), -1], [0, *[-1] * (pages - 1)]])
        for causal, used in ((False, (_ROWS, _ROWS)), (True, (_ROWS, 0))):
            out = torch.full((2 * _ROWS, _HEADS, dv), _SENTINEL, dtype=q.dtype, device=device)
            got, lse = attend(
                q=q, k=k, v=v, q_v=q_v if title == "MLA" else None, out=out,
                cu_seqlens_q=ints((0, _ROWS, 2 * _ROWS)), seqused_q=ints(used) if causal else None, seqused_k=ints(_LENS),
                max_seqlen_q=_ROWS, max_seqlen_k=pages * page, page_table=table, leftpad_k=ints((0, 0)),
                softmax_scale=(dk + dv) ** -0.5, is_causal=causal,
            )  # fmt: skip
            for r, rows in enumerate(used):
                at = slice(r * _ROWS, (r + 1) * _ROWS)
                if rows == 0:
                    if not bool((got[at] == _SENTINEL).all()):
                        return f"{title} wrote rows of a request with seqused_q 0"
                    continue
                keys, values = (_keys(cache, table[r], _LENS[r]) for cache in (k, v))
                error = _error(q[at], keys, values, q_v[at] if title == "MLA" else None, (dk + dv) ** -0.5, causal, got[at], lse[:, at].T)
                if error is not None:
                    return f"{title}{' causal' if causal else ''}, {error}"
    return None


def check_flashmla(attend: Attend, device: torch.device) -> str | None:
    """One request of two pages with NaN behind its last key, and one whose page does not exist. None: right; else what is wrong."""
    made = torch.Generator().manual_seed(0)
    cache = _poisoned(3, 64, 576, made, device)
    q = _normal((2, _ROWS, _HEADS, 576), made, device)
    table = torch.tensor([[1, 2], [-1, -1]], dtype=torch.int32, device=device)
    got, lse = attend(
        q=q, kcache=cache, head_size_v=512, seqlens_k=torch.tensor((_LENS[0], 1), dtype=torch.int32, device=device),
        block_table=table, softmax_scale=576**-0.5, is_causal=False,
    )  # fmt: skip
    keys = _keys(cache, table[0], _LENS[0])
    return _error(q[0], keys, keys[:, :512], None, 576**-0.5, False, got[0], lse[0].T)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _normal(shape: tuple[int, ...], made: torch.Generator, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=made).to(device, _dtype(device))


def _poisoned(pages: int, page: int, dim: int, made: torch.Generator, device: torch.device) -> torch.Tensor:
    """A cache [pages, page, 1, dim] whose page 0 holds the second request's keys and the others the first's; NaN elsewhere."""
    cache = torch.full((pages, page, 1, dim), float("nan"))
    cache[0, : _LENS[1], 0] = torch.randn(_LENS[1], dim, generator=made)
    cache[1:].view(-1, dim)[: _LENS[0]] = torch.randn(_LENS[0], dim, generator=made)
    return cache.to(device, _dtype(device))


def _keys(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """fp32 [length, dim] of a request."""
    listed = pages[: -(-length // cache.shape[1])].long()
    return cache[listed].flatten(0, 1)[:length, 0].float()


def _error(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, q_v: torch.Tensor | None, scale: float, causal: bool,
    out: torch.Tensor, lse: torch.Tensor,
) -> str | None:  # fmt: skip
    """How out [L, H, Dv] and lse [L, H] miss what plain attention of q [L, H, Dk] gives; None where they do not."""
    logits = torch.einsum("thd,nd->thn", q.float(), keys)
    if q_v is not None:
        logits = logits + torch.einsum("thd,nd->thn", q_v.float(), values)
    logits = logits * scale
    if causal:
        rows, length = q.shape[0], keys.shape[0]
        hidden = torch.ones(rows, length, dtype=torch.bool, device=q.device).triu(length - rows + 1)
        logits = logits.masked_fill(hidden[:, None], float("-inf"))
    wanted = torch.einsum("thn,nd->thd", logits.softmax(-1), values)
    for title, a, b in (("out", out.float(), wanted), ("log-sum-exp", lse.float(), logits.logsumexp(-1))):
        distance = float((a - b).abs().amax())
        if not distance <= _TOLERANCE:  # NaN is not
            return f"{title} is off by {distance:.3g}"
    return None
