"""What an implementation is: its name, what it can serve, and how it is run.

Registering (registry.py) adds a name, choosing (dispatch.py) asks ``why_not``, running (op.py) calls ``run``.
None of the three does another's work. Implementations never import each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from flashmap.core.inputs import Call
    from flashmap.core.request import DeviceInfo, Limits, VerifyRequest


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something was not done: a stable ``code``, a sentence with the offending value, and a fix if there is one."""

    code: str
    text: str
    fix: str | None = None

    def __str__(self) -> str:
        return f"{self.text} ({self.fix})" if self.fix else self.text


class Declined(RuntimeError):
    """No implementation may serve the call. ``reasons`` is a tuple of :class:`Reason`; nothing was launched or changed."""

    def __init__(self, name: str, reasons: tuple[Reason, ...]) -> None:
        self.name = name
        self.reasons = reasons
        super().__init__(f"{name} cannot serve this call: " + "; ".join(str(r) for r in reasons))

    def __reduce__(self) -> tuple[type[Declined], tuple[str, tuple[Reason, ...]]]:
        """Engines send exceptions from a worker to the parent process."""
        return type(self), (self.name, self.reasons)


@dataclass(frozen=True, slots=True)
class Capability:
    """What an implementation can serve, as data. None accepts everything.

    ``devices``: "cpu", "cuda"; ``dtypes`` and ``kv_dtypes``: the names of request.DTYPES; ``head_dims``: accepted Dk;
    ``min_capability``: the lowest CUDA compute capability; ``features``: those of request.FEATURES that are served;
    ``capturable``: may run while a CUDA graph is captured.
    """

    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    dtypes: frozenset[str] | None = None
    kv_dtypes: frozenset[str] | None = None
    head_dims: frozenset[int] | None = None
    max_query_len: int | None = None
    min_capability: tuple[int, int] | None = None
    features: frozenset[str] | None = None
    capturable: bool = False

    def why_not(self, request: VerifyRequest, device: DeviceInfo) -> tuple[Reason, ...]:
        """All reasons, from the data above alone, why ``request`` is not served on ``device``."""
        found = []
        if device.type not in self.devices:
            found.append(Reason("device", f"runs on {_listed(self.devices)}, not on {device.type!r}"))
        for code, value, allowed in (
            ("dtype", request.dtype, self.dtypes),
            ("kv_dtype", request.kv_dtype, self.kv_dtypes),
            ("head_dim", request.head_dim, self.head_dims),
        ):
            if allowed is not None and value not in allowed:
                found.append(Reason(code, f"{code} {value} is not one of {_listed(allowed)}"))
        if self.max_query_len is not None and request.max_query_len > self.max_query_len:
            found.append(Reason("query_len", f"max_query_len {request.max_query_len} is more than {self.max_query_len}"))
        if device.type == "cuda" and self.min_capability is not None and device.capability < self.min_capability:
            have, want = (".".join(map(str, c)) for c in (device.capability, self.min_capability))
            found.append(Reason("capability", f"compute capability {have} is less than {want}"))
        if self.features is not None:
            for feature in request.features():
                if feature not in self.features:
                    found.append(Reason(f"feature.{feature}", f"{feature} is not served, only {_listed(self.features) or 'plain calls'}"))
        if device.capturing and not self.capturable:
            found.append(Reason("capturing", "it reads device values on the host, which a CUDA graph capture forbids"))
        return tuple(found)


@runtime_checkable
class VerifyAttention(Protocol):
    """An implementation of the op. :class:`Implementation` gives the parts that are rarely of interest."""

    @property
    def name(self) -> str: ...

    @property
    def capability(self) -> Capability: ...

    def why_not(self, request: VerifyRequest, device: DeviceInfo) -> tuple[Reason, ...]:
        """Every reason why it cannot serve ``request`` on ``device``; empty: it can. Pure and cheap."""

    def not_ready(self, call: Call) -> tuple[Reason, ...]:
        """What ``call`` still lacks (scratch, compiled kernels) where it may not be made: under graph capture."""

    def prepare(self, request: VerifyRequest, limits: Limits, device: torch.device) -> None:
        """Compile and allocate for every call of this static shape within ``limits``."""

    def run(self, call: Call) -> None:
        """Write ``call.out`` (and ``call.lse`` unless None). ``call`` is valid and was accepted by ``why_not``."""


@dataclass(frozen=True)
class Implementation:
    """Base with the defaults: ``why_not`` from ``capability``, always ready, nothing to prepare. Override ``run``."""

    name: str
    capability: Capability = field(default_factory=Capability)
    # The first why_not on a machine may compile for minutes: a list of all implementations does not ask.
    slow_to_ask: ClassVar[bool] = False

    def why_not(self, request: VerifyRequest, device: DeviceInfo) -> tuple[Reason, ...]:
        return self.capability.why_not(request, device)

    def not_ready(self, call: Call) -> tuple[Reason, ...]:
        return ()

    def prepare(self, request: VerifyRequest, limits: Limits, device: torch.device) -> None:
        return None

    def run(self, call: Call) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define run(call)")


def _listed(values: frozenset[str] | frozenset[int] | frozenset[str | int]) -> str:
    return ", ".join(str(v) for v in sorted(values, key=str))
