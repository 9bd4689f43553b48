"""What adapters do with a verify batch: ask dispatch, prepare, run the op, count, compare, log.

Every call of a hooked backend is counted once: "routed" to an implementation, or "left" to the engine with a code. Under
CUDA graphs Python runs at capture alone, so the counts are those of the captured calls.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmap import env
from flashmap.adapters import observe
from flashmap.core import dispatch, stats
from flashmap.core.inputs import KVCache
from flashmap.core.interface import Declined
from flashmap.core.op import prepare, verify_attention
from flashmap.core.request import DeviceInfo, Limits, VerifyRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One call of the op: ``verify_attention(q, kv, **arguments)``."""

    q: torch.Tensor
    kv: KVCache
    arguments: Mapping[str, Any]


class Serving:
    """Of one engine: ``engine`` is under what its calls are counted, ``title`` what log lines call it."""

    def __init__(self, engine: str, title: str) -> None:
        self.engine, self.title = engine, title
        self._prepared: set[tuple[VerifyRequest, Limits, str]] = set()
        self._told: set[tuple[str, ...]] = set()
        self._accepted: dict[VerifyRequest, bool] = {}

    def left(self, kernel: str, role: str, code: str, text: str = "", level: int = logging.INFO) -> None:
        """The engine's own kernel keeps a call."""
        stats.count(self.engine, "left", code)
        observe.tick()
        self.tell(level, kernel, role, code, f"left to {self.title} ({code}{': ' if text else ''}{text})")

    def choose(self, request: VerifyRequest, device: DeviceInfo, kernel: str, role: str, *, right: bool = True) -> str | None:
        """The implementation that serves ``request``, or None, counted: the engine does.

        ``right`` False: the engine's kernel would not give the right answer, so that ours need not be the faster one.
        Raises Declined under FLASHMAP_STRICT where FLASHMAP_IMPL cannot serve the call.
        """
        decision = dispatch.route(request, device, kernel if right else None)
        if decision.winner is None:
            reason = decision.reasons[0]
            said = (kernel, role, reason.code) in self._told  # then no text is made
            self.left(kernel, role, reason.code, "" if said else f"{dispatch.request_class(request)}: {reason}")
        return decision.winner

    def accepts(self, request: VerifyRequest, batch: Batch, kernel: str, role: str, out: torch.Tensor) -> bool:
        """Whether the op takes ``batch``, whose static facts are ``request``: asked once for each kind, said once in the log."""
        known = self._accepted.get(request)
        if known is None:
            try:
                found = VerifyRequest.of(batch.q, batch.kv, out=out, **batch.arguments)
                known = replace(found, max_kv_len=request.max_kv_len) == request  # a batch may be shown with fewer pages
                text = f"the op sees {found}, not {request}"
            except (TypeError, ValueError) as error:
                known, text = False, str(error)
            self._accepted[request] = known
            if not known:
                self.tell(logging.WARNING, kernel, role, "input", text)
        return known

    def run(self, batch: Batch, winner: str, kernel: str, role: str, out: torch.Tensor) -> bool:
        """Write ``winner``'s output into ``out``; False, counted: it lacks something under capture and the engine has to do it."""
        try:
            verify_attention(batch.q, batch.kv, out=out, impl=winner, **batch.arguments)
        except Declined as lacking:  # before anything was launched
            if not DeviceInfo.of(out.device).capturing:
                raise
            self.left(kernel, role, lacking.reasons[0].code, str(lacking), logging.WARNING)
            return False
        stats.count(winner, "routed")
        observe.tick()
        return True

    def prepare(self, request: VerifyRequest, limits: Limits, device: torch.device, winner: str) -> None:
        """Compile and take scratch for calls like ``request`` within ``limits``; the second time nothing."""
        kind = replace(request, num_requests=1, max_kv_len=None if request.max_kv_len is None else limits.max_kv_len)
        if (kind, limits, winner) not in self._prepared:
            self._prepared.add((kind, limits, winner))
            prepare(kind, limits, device=device, impl=winner)

    def tell(self, level: int, kernel: str, role: str, key: str, text: str) -> None:
        """One line a process for each (kernel, role, key)."""
        if (kernel, role, key) not in self._told:
            self._told.add((kernel, role, key))
            logger.log(level, "flashmap: %s, %s: %s", kernel, role, text)

    def forget(self) -> None:
        """What was prepared and told: for an installation that is removed."""
        self._prepared.clear()
        self._told.clear()
        self._accepted.clear()


def checking(device: torch.device) -> bool:
    """Whether the engine's own kernel shall run too (FLASHMAP_CHECK). Comparing reads device values, so not under capture."""
    return bool(env.get("FLASHMAP_CHECK")) and not DeviceInfo.of(device).capturing
