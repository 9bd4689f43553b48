"""``fa3_tail``, ``fa3`` and ``flashmla_tail``: attention kernels of other libraries, made to serve the op.

FlashAttention 3 and FlashMLA know causal masks at most. The two ``_tail`` implementations let them do the prefix, which every
query token sees whole, and do the draft tokens, their mask, and the merge of both by log-sum-exp in one kernel of ours. ``fa3``
leaves causal chains to FlashAttention 3 altogether. They run when a caller, or a table of measured times, names them.
docs/kernels.md describes them.

Registers the names and says what each can serve; nothing of Triton or of a library is loaded before it is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch

from flashmap.core.implementations.composite.libraries import HOPPER, fa3, flashmla
from flashmap.core.implementations.probing import Attend, Found
from flashmap.core.inputs import Call
from flashmap.core.interface import Capability, Declined, Implementation, Reason
from flashmap.core.request import DeviceInfo, Limits, VerifyRequest

_LATENT = (576, 512)  # DeepSeek's: a latent of 512 columns, which are also V, and 64 for the position


@dataclass(frozen=True)
class Composite(Implementation):
    """A library with kernels of ours around it; launch.py knows by its name how it is called.

    ``find``: the library, as this process has it; tests give another one.
    """

    find: Callable[[DeviceInfo], Found] = fa3

    def why_not(self, request: VerifyRequest, device: DeviceInfo) -> tuple[Reason, ...]:
        found = [*self.capability.why_not(request, device), *self.shape(request)]
        if not request.aligned:
            found.append(
                Reason("alignment", "the cache's strides or addresses are no multiples of 16: the library copies 16 bytes at once")
            )
        if device.triton is None:
            found.append(Reason("no_triton", "triton is not installed", "pip install triton"))
        if device.type == "cuda" and device.capability != HOPPER:
            have = ".".join(map(str, device.capability))
            found.append(Reason("capability", f"the library's kernels are for compute capability 9.0, this is {have}"))
        elif device.type in self.capability.devices:
            found += self.find(device).reasons
        return tuple(found)

    def shape(self, request: VerifyRequest) -> tuple[Reason, ...]:
        """What the library cannot serve of the heads and pages. FlashAttention 3: one head dimension, or 192/128, or 64 + 512."""
        dims = (request.head_dim, request.v_head_dim)
        if request.latent:
            served = dims == _LATENT
        else:
            served = dims == (192, 128) or (dims[0] == dims[1] and dims[0] % 8 == 0 and dims[0] <= 256)
        if served:
            return ()
        text = f"head dimensions {dims[0]}/{dims[1]} are not served: equal multiples of 8 up to 256, 192/128, or for a latent cache 576/512"
        return (Reason("head_dim", text),)

    def not_ready(self, call: Call) -> tuple[Reason, ...]:
        reasons: tuple[Reason, ...] = _launch().not_ready(call, self.name)
        return reasons

    def prepare(self, request: VerifyRequest, limits: Limits, device: torch.device) -> None:
        _launch().prepare(request, limits, device, self.name, self._attend(device))

    def run(self, call: Call) -> None:
        _launch().run(call, self.name, self._attend(call.q.device))

    def _attend(self, device: torch.device) -> Attend:
        found = self.find(DeviceInfo.of(device))
        if found.attend is None:  # why_not() said so to whoever asked
            raise Declined(self.name, found.reasons)
        return found.attend


@dataclass(frozen=True)
class CompositeMla(Composite):
    """FlashMLA: latent caches with pages of 64."""

    def shape(self, request: VerifyRequest) -> tuple[Reason, ...]:
        found = []
        dims = (request.head_dim, request.v_head_dim)
        if not request.latent or dims != _LATENT:
            kind = "a latent" if request.latent else "no latent"
            found.append(
                Reason("head_dim", f"this is {kind} cache with head dimensions {dims[0]}/{dims[1]}: only latent 576/512 is served")
            )
        if request.page_size != 64 or request.kv_layout != "paged":
            found.append(Reason("page_size", f"page size {request.page_size} is not 64"))
        return tuple(found)


@functools.cache
def _launch() -> ModuleType:
    return import_module(f"{__name__}.launch")


_ANY_DRAFT = frozenset({"tree", "latent", "draft_kv", "draft_slots", "positions", "kv_start", "sinks", "lse"})
_CHAIN_IN_CACHE = frozenset({"latent", "positions", "kv_start"})


def _hopper(dtypes: set[str], features: frozenset[str]) -> Capability:
    return Capability(
        devices=frozenset({"cuda"}), dtypes=frozenset(dtypes), kv_dtypes=frozenset(dtypes), features=features, capturable=True
    )


FA3_TAIL = Composite("fa3_tail", _hopper({"fp16", "bf16"}, _ANY_DRAFT), fa3)
FA3 = Composite("fa3", _hopper({"fp16", "bf16"}, _CHAIN_IN_CACHE), fa3)
FLASHMLA_TAIL = CompositeMla("flashmla_tail", _hopper({"bf16"}, _ANY_DRAFT), flashmla)
