"""``triton_splitkv``: split-KV verify attention in Triton. Registers the name and says what it can serve.

A request's prefix is shared out over programs, all rows of a KV head packed into each; a second kernel merges the
parts by their log-sum-exp. docs/kernels.md has the reasons. Triton itself is imported when the first call is launched.
"""

from __future__ import annotations

import functools
from importlib import import_module
from types import ModuleType

import torch

from flashmap.core.implementations.triton_splitkv.config import config_for
from flashmap.core.inputs import Call
from flashmap.core.interface import Capability, Implementation, Reason
from flashmap.core.request import DeviceInfo, Limits, VerifyRequest


class TritonSplitKV(Implementation):
    """CUDA from compute capability 8.0, and any device under TRITON_INTERPRET=1 (fp32 and fp16)."""

    def why_not(self, request: VerifyRequest, device: DeviceInfo) -> tuple[Reason, ...]:
        found = [] if device.type == "cpu" and device.interpreted else list(self.capability.why_not(request, device))
        if device.triton is None:
            found.append(Reason("no_triton", "triton is not installed", "pip install triton"))
        if device.type == "cpu" and device.interpreted and request.dtype == "bf16":
            found.append(
                Reason("interpreter_bf16", "Triton's interpreter computes bf16 dots wrongly (triton issue 11584)", "use fp16 or fp32")
            )
        if device.type == "cuda":
            if request.kv_dtype == "fp8_e4m3" and (8, 0) <= device.capability < (8, 9):
                have = ".".join(map(str, device.capability))
                found.append(
                    Reason("fp8_capability", f"Triton converts fp8 e4m3 from compute capability 8.9, this is {have}", "use an e5m2 cache")
                )
            if not found and config_for(request, device) is None:
                text = f"head dimensions {request.head_dim}/{request.v_head_dim} in {request.dtype} do not fit {device.shared_memory >> 10} KiB of shared memory"
                found.append(Reason("shared_memory", text))
        return tuple(found)

    def not_ready(self, call: Call) -> tuple[Reason, ...]:
        reasons: tuple[Reason, ...] = _launch().not_ready(call)
        return reasons

    def prepare(self, request: VerifyRequest, limits: Limits, device: torch.device) -> None:
        _launch().prepare(request, limits, device)

    def run(self, call: Call) -> None:
        _launch().run(call)


@functools.cache
def _launch() -> ModuleType:
    return import_module(f"{__name__}.launch")


IMPLEMENTATION = TritonSplitKV(
    "triton_splitkv",
    Capability(devices=frozenset({"cuda"}), min_capability=(8, 0), capturable=True),
)
