"""Choosing: a pure function of a request, a device and a policy. It looks nothing up on a GPU and launches nothing.

``choose`` asks every candidate for its reasons; ``select`` is what op.py calls: the cached choice for one call, logged
once, counted, and raising Declined where nothing may run. docs/how-it-decides.md is this file in prose.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from flashmap import env
from flashmap.core import engines, registry, stats, tables
from flashmap.core.inputs import Call
from flashmap.core.interface import Declined, Reason, VerifyAttention
from flashmap.core.request import DeviceInfo, VerifyRequest
from flashmap.core.tables import Table

logger = logging.getLogger(__name__)
ENGINE = "engine"  # stands for the engine's own kernel where a Decision lists what was declined
FALLBACK = "torch_dense"
_FORCE = "set FLASHMAP_IMPL to a name to force it"


@dataclass(frozen=True, slots=True)
class Policy:
    """What the caller wants. ``impl``: this implementation or nothing. ``strict``: no falling back to torch_dense on a GPU.

    ``engine_kernel``: the kernel that an engine would run instead, such as "vllm.CPU_ATTN"; where it is known to be the
    faster one, the winner is None and the adapter leaves the call to the engine.
    """

    impl: str | None = None
    strict: bool = False
    engine_kernel: str | None = None

    @classmethod
    def from_env(cls, impl: str | None = None, engine_kernel: str | None = None) -> Policy:
        """``impl`` alone, or else FLASHMAP_IMPL with FLASHMAP_STRICT. ValueError when FLASHMAP_IMPL names nothing."""
        if impl is not None:
            return cls(impl, engine_kernel=engine_kernel)
        impl = env.get("FLASHMAP_IMPL")
        if impl is not None and impl not in registry.names():
            raise ValueError(f"FLASHMAP_IMPL={impl!r} names no implementation: set it to one of {', '.join(registry.names())}, or unset it")
        return cls(impl, env.get("FLASHMAP_STRICT"), engine_kernel)


@dataclass(frozen=True, slots=True)
class Decision:
    """Who serves a request. ``winner`` None: nobody here (an engine keeps the call, or the op raises Declined).

    ``declined`` lists in the order of preference those that cannot serve it, each with all its reasons; ``passed`` the
    names that could but are preferred less.
    """

    winner: str | None
    declined: tuple[tuple[str, tuple[Reason, ...]], ...] = ()
    passed: tuple[str, ...] = ()

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """All reasons of all that declined, in one tuple."""
        return tuple(reason for _, reasons in self.declined for reason in reasons)


def preference(request: VerifyRequest, device: DeviceInfo, table: Table | None = None) -> tuple[str, ...]:
    """The names that an automatic choice tries, best first. What is not listed runs only when it is named.

    On a GPU those come first that ``table`` has times of, by their times, then the one that serves every GPU.
    """
    if device.type != "cuda":
        return (FALLBACK,)
    measured = table.order(request) if table is not None else ()
    return tuple(dict.fromkeys((*(name for name in measured if name in registry.names()), "triton_splitkv", FALLBACK)))


def choose(
    request: VerifyRequest,
    device: DeviceInfo,
    policy: Policy,
    *,
    table: Table | None = None,
    get: Callable[[str], VerifyAttention] = registry.get,
) -> Decision:
    """Who serves ``request`` on ``device``. Raises ValueError for a ``policy.impl`` that is not registered.

    ``table``: the measured times of that device, which ``tables.in_force`` reads; None: there are none.
    """
    if policy.impl is not None:
        reasons = get(policy.impl).why_not(request, device)
        return Decision(None, ((policy.impl, reasons),)) if reasons else Decision(policy.impl)

    declined: list[tuple[str, tuple[Reason, ...]]] = []
    if policy.engine_kernel is not None and device.type != "cuda":
        text = f"on {device.type!r} the engine's own kernel ({policy.engine_kernel}) is faster than {FALLBACK}"
        declined.append((ENGINE, (Reason("engine_faster", text, _FORCE),)))
        return Decision(None, tuple(declined))

    able, faster = [], None
    for name in preference(request, device, table):
        reasons = get(name).why_not(request, device)
        if not reasons and name == FALLBACK and device.type == "cuda" and (policy.strict or policy.engine_kernel is not None):
            why = "FLASHMAP_STRICT is set" if policy.strict else f"{policy.engine_kernel} is faster"
            reasons = (Reason("fast_path_lost", f"{FALLBACK} is the only one left on a GPU and {why}"),)
        if reasons:
            declined.append((name, reasons))
            continue
        slower = engines.faster(policy.engine_kernel, name, request, device, table) if policy.engine_kernel is not None else None
        if slower is None:
            able.append(name)
        faster = faster or slower
    if faster is not None and not able:
        return Decision(None, ((ENGINE, (Reason("engine_faster", faster, _FORCE),)),))
    return Decision(able[0] if able else None, tuple(declined), tuple(able[1:]))


def select(call: Call, impl: str | None = None) -> VerifyAttention:
    """The implementation that runs ``call``. Raises Declined before anything is launched."""
    device = DeviceInfo.of(call.q.device)
    policy = Policy.from_env(impl)
    decision = decide(call.request, device, policy)
    for loser, reasons in decision.declined:  # also where the next one serves the call
        for reason in reasons:
            stats.count(loser, "declined", reason.code)
    if decision.winner is None:
        raise Declined(policy.impl or "verify_attention", decision.reasons)
    winner = registry.get(decision.winner)
    if device.capturing:
        lacking = winner.not_ready(call)
        if lacking:
            for reason in lacking:
                stats.count(winner.name, "declined", reason.code)
            raise Declined(winner.name, lacking)
    return winner


def route(request: VerifyRequest, device: DeviceInfo, engine_kernel: str | None) -> Decision:
    """What an adapter asks: who serves a call that ``engine_kernel`` would serve otherwise. Winner None: leave it to the engine.

    ``engine_kernel`` None: the engine would not give the right answer, so that ours need not be faster.

    FLASHMAP_IMPL and FLASHMAP_STRICT count as in the op. Raises Declined where FLASHMAP_STRICT is set and the
    implementation that FLASHMAP_IMPL names cannot serve the call.
    """
    policy = Policy.from_env(engine_kernel=engine_kernel)
    decision = decide(request, device, policy)
    if decision.winner is None and policy.strict and policy.impl is not None:
        raise Declined(policy.impl, decision.reasons)
    return decision


def decide(request: VerifyRequest, device: DeviceInfo, policy: Policy) -> Decision:
    """``choose`` by the table in force for ``device``, logged once for each kind of request, and cached.

    Not under capture: a library is not tried then, and may be found later.
    """
    cached = _decide.__wrapped__ if device.capturing else _decide
    return cached(request, device, policy, registry.changes())


@functools.lru_cache(maxsize=4096)
def _decide(request: VerifyRequest, device: DeviceInfo, policy: Policy, changes: int) -> Decision:
    """``choose``, logged once for each request: a new decision at INFO, the loss of the fast path at WARNING.

    ``changes``, of the registry, is there to be part of the cache's key.
    """
    decision = choose(request, device, policy, table=tables.in_force(device))
    lost = device.type == "cuda" and policy.impl is None and decision.winner == FALLBACK
    lost = lost or (policy.impl is not None and policy.engine_kernel is not None and decision.winner is None)  # named, and not used
    level = logging.WARNING if lost else logging.INFO
    if logger.isEnabledFor(level):
        kind = request_class(request)
        if _announce(kind, device.type, decision.winner):
            because = "; ".join(f"{name}: {', '.join(str(r) for r in reasons)}" for name, reasons in decision.declined)
            logger.log(
                level,
                "flashmap: %s on %s -> %s%s",
                kind,
                device.name,
                decision.winner or policy.engine_kernel,
                f" (declined: {because})" if because else "",
            )
    return decision


@functools.lru_cache(maxsize=4096)
def request_class(request: VerifyRequest) -> str:
    """A request in one phrase, without the sizes of the batch: what a log line and ``explain`` call it."""
    kind = f"{request.heads}/{request.kv_heads} heads d{request.head_dim}"
    if request.v_head_dim != request.head_dim:
        kind += f"/{request.v_head_dim}"
    extras = [f for f in request.features() if f not in ("latent", "tree", "slots")]
    return (
        f"{'MLA' if request.latent else 'GQA'} {kind}, {request.dtype}, {request.kv_layout} {request.kv_dtype} cache, "
        f"{request.mask + ' tree' if request.mask else 'chain'} of {request.max_query_len}" + (f", {' '.join(extras)}" if extras else "")
    )


def _announce(kind: str, device: str, winner: str | None) -> bool:
    """True the first time."""
    key = (kind, device, winner)
    new = key not in _announced
    _announced.add(key)
    return new


_announced: set[tuple[str, str, str | None]] = set()
