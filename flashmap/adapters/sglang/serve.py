"""What both backends do with a verify batch: the roles, and one way from a translated call to the op's output.

Used by triton_attn.py and fa3_attn.py. What is common to all engines is in ``flashmap.adapters.serving``.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from flashmap.adapters import observe
from flashmap.adapters.serving import Batch, Serving, checking
from flashmap.core import dispatch
from flashmap.core.request import DeviceInfo, Limits, VerifyRequest

__all__ = ["MODES", "attend", "checking", "compare", "forget", "left", "remember_limits", "role", "tell"]

# The forward modes that can be served: how ForwardMode tells them, and what their batches do.
MODES = {
    "target_verify": ("is_target_verify", "target verify"),
    "draft_extend_v2": ("is_draft_extend_v2", "draft extend"),
    "draft_decode": ("is_decode", "draft decode"),  # of a draft runner's backends alone
}

_serving = Serving("sglang", "SGLang")
_limits: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
left, tell = _serving.left, _serving.tell


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


def attend(
    batch: Batch | str, kernel: str, role: str, backend: Any, out: torch.Tensor | None, *, right: bool = True
) -> torch.Tensor | None:
    """The op's output for ``batch``, in ``out`` unless None, or None, counted: the engine's own kernel has to give it.

    ``batch``: a code says that it is none for the op. ``right``: as in :meth:`Serving.choose`. Raises Declined under
    FLASHMAP_STRICT where FLASHMAP_IMPL cannot serve the call.
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
    winner = _serving.choose(request, device, kernel, role, right=right)
    if winner is None:
        return None
    kind = dispatch.request_class(request)
    tell(logging.INFO, kernel, role, kind, f"{kind} -> {winner}")
    if backend in _limits and not device.capturing:  # for the graphs that will be captured, at the eager run that SGLang makes before
        requests, keys = _limits[backend]
        _serving.prepare(request, Limits(requests, max(1, request.max_query_len), keys), q.device, winner)
    return out if _serving.run(batch, winner, kernel, role, out) else None


def compare(layer: Any, role: str, ours: torch.Tensor, engine: torch.Tensor) -> None:
    observe.record(f"layer {layer.layer_id} ({role})", ours, engine)


def forget() -> None:
    """What was prepared, told and remembered of backends: for an installation that is removed."""
    _limits.clear()
    _serving.forget()
