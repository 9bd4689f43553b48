"""What both backends do with a verify batch: ask dispatch, prepare, run the op, count, compare, log. Used by triton_attn.py and fa3_attn.py.

Every call of a hooked backend in a hooked mode is counted once: "routed" to an implementation, or "left" to sglang with a
code. Under CUDA graphs Python runs at capture alone, so the counts are those of the captured calls.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from typing import Any

import torch

from flashmap import env
from flashmap.adapters import observe
from flashmap.adapters.sglang.translate import Batch
from flashmap.core import dispatch, stats
from flashmap.core.interface import Declined
from flashmap.core.op import prepare, verify_attention
from flashmap.core.request import DeviceInfo, Limits, VerifyRequest

logger = logging.getLogger(__name__)
ENGINE = "sglang"

# The forward modes that can be served: how ForwardMode tells them, and what their batches do.
MODES = {"target_verify": ("is_target_verify", "target verify"), "draft_extend_v2": ("is_draft_extend_v2", "draft extend")}

_limits: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
_prepared: set[VerifyRequest] = set()
_told: set[tuple[str, ...]] = set()


def role(forward_mode: Any, modes: tuple[str, ...]) -> str | None:
    """What a batch of this mode does, if it is one of ``modes``."""
    for mode in modes:
        method, name = MODES[mode]
        if getattr(forward_mode, method)():
            return name
    return None


def remember_limits(backend: Any, max_requests: int) -> None:
    """Called when a backend makes its buffers for CUDA graphs: its first call of each kind then prepares for these maxima."""
    _limits[backend] = (max_requests, backend.max_context_len)


def left(kernel: str, role: str, code: str, text: str = "", level: int = logging.INFO) -> None:
    """The engine's own kernel keeps a call."""
    stats.count(ENGINE, "left", code)
    observe.tick()
    tell(level, kernel, role, code, f"left to SGLang ({code}{': ' if text else ''}{text})")


def attend(
    batch: Batch | str, kernel: str, role: str, backend: Any, out: torch.Tensor | None, *, engine_kernel: str | None = ""
) -> torch.Tensor | None:
    """The op's output for ``batch``, in ``out`` unless None, or None, counted: the engine's own kernel has to give it.

    ``batch``: a code says that it is none for the op. ``engine_kernel`` is what dispatch takes the engine's kernel to be: ``kernel``
    unless given; None: the engine's is not right. Raises Declined under FLASHMAP_STRICT where FLASHMAP_IMPL cannot serve the call.
    """
    if isinstance(batch, str):
        left(kernel, role, batch)
        return None
    q, kv = batch.q, batch.kv
    if out is None:
        out = q.new_empty(*q.shape[:2], kv.v.shape[-1] if kv.v is not None else kv.v_head_dim)  # type: ignore[arg-type]  # one of the two is there
    try:
        request = VerifyRequest.of(q, kv, out=out, **batch.arguments)
    except (TypeError, ValueError) as error:
        left(kernel, role, "input", str(error), logging.WARNING)
        return None
    device = DeviceInfo.of(q.device)
    decision = dispatch.route(request, device, kernel if engine_kernel == "" else engine_kernel)
    winner, kind = decision.winner, dispatch.request_class(request)
    if winner is None:
        left(kernel, role, decision.reasons[0].code, f"{kind}: {decision.reasons[0]}")
        return None
    tell(logging.INFO, kernel, role, kind, f"{kind} -> {winner}")
    if backend in _limits and not device.capturing:
        _prepare(request, *_limits[backend], q.device, winner)
    try:
        verify_attention(q, kv, out=out, impl=winner, **batch.arguments)
    except Declined as lacking:  # before anything was launched
        if not device.capturing:
            raise
        left(kernel, role, lacking.reasons[0].code, str(lacking), logging.WARNING)
        return None
    stats.count(winner, "routed")
    observe.tick()
    return out


def checking(device: torch.device) -> bool:
    """Whether the engine's own kernel shall run too (FLASHMAP_CHECK). Comparing reads device values, so not under capture."""
    return bool(env.get("FLASHMAP_CHECK")) and not DeviceInfo.of(device).capturing


def compare(layer: Any, role: str, ours: torch.Tensor, engine: torch.Tensor) -> None:
    observe.record(f"layer {layer.layer_id} ({role})", ours, engine)


def tell(level: int, kernel: str, role: str, key: str, text: str) -> None:
    """One line a process for each (kernel, role, key)."""
    if (kernel, role, key) not in _told:
        _told.add((kernel, role, key))
        logger.log(level, "flashmap: %s, %s: %s", kernel, role, text)


def forget() -> None:
    """What was prepared, told and remembered of backends: for an installation that is removed."""
    _limits.clear()
    _prepared.clear()
    _told.clear()


def _prepare(request: VerifyRequest, max_requests: int, max_kv_len: int, device: torch.device, winner: str) -> None:
    """Compile and take scratch for the graphs that will be captured, at the eager run that SGLang makes before."""
    kind = replace(request, num_requests=1, max_kv_len=None if request.max_kv_len is None else max_kv_len)
    if kind not in _prepared:
        _prepared.add(kind)
        prepare(kind, Limits(max_requests, max(1, request.max_query_len), max_kv_len), device=device, impl=winner)
