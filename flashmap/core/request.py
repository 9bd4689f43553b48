"""The static facts of a call and of a device: hashable, free of tensors, enough to choose an implementation.

dispatch.py and ``why_not`` see nothing else, so routing is tested without a GPU.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from importlib import metadata, util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DTYPES = ("fp32", "fp16", "bf16")
KV_DTYPES = (*DTYPES, "fp8_e4m3", "fp8_e5m2")
FEATURES = (
    "tree", "slots", "latent", "draft_kv", "draft_slots", "window", "positions", "kv_start", "sinks", "softcap", "lse",
    "fp8", "scales",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """An engine's maxima, for ``prepare``: requests in a batch, query tokens of a request, keys of a request."""

    max_requests: int
    max_query_len: int
    max_kv_len: int

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_query_len", "max_kv_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """What is known of a call before any device value is read.

    ``max_kv_len`` is the host's bound on a request's keys (block table width x page size), None for slot lists.
    ``draft`` is "cache" (the last tokens listed), "slots" (draft_slots) or "dense" (draft_kv); ``mask`` a
    TreeMask layout or None; ``scales`` "none" (both 1.0), "host", "device", or where one of the two is a tensor and the
    other a number "device_k" or "device_v". ``page_size`` is 1 for slot lists. ``int64`` names the index arguments that
    are int64 rather than int32. ``aligned``: the cache's strides and addresses are multiples of 16.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    num_requests: int = 1
    max_query_len: int = 1
    kv_layout: str = "paged"
    page_size: int = 1
    max_kv_len: int | None = None
    latent: bool = False
    draft: str = "cache"
    mask: str | None = None
    mask_indptr: bool = False
    window: int | None = None
    positions: bool = False
    kv_start: bool = False
    sinks: bool = False
    softcap: bool = False
    return_lse: bool = False
    scales: str = "none"
    int64: tuple[str, ...] = ()
    aligned: bool = True

    @classmethod
    def of(cls, q: torch.Tensor, kv: Any, **arguments: Any) -> VerifyRequest:
        """The request of ``verify_attention(q, kv, **arguments)``. Validates as the call does, launches nothing."""
        from flashmap.core.inputs import resolve

        arguments.pop("impl", None)
        return resolve(q, kv, **arguments).request

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    def features(self) -> tuple[str, ...]:
        """The names of FEATURES that this request uses."""
        used = {
            "tree": self.mask is not None,
            "slots": self.kv_layout == "slots",
            "latent": self.latent,
            "draft_kv": self.draft == "dense",
            "draft_slots": self.draft == "slots",
            "window": self.window is not None,
            "positions": self.positions,
            "kv_start": self.kv_start,
            "sinks": self.sinks,
            "softcap": self.softcap,
            "lse": self.return_lse,
            "fp8": self.kv_dtype.startswith("fp8"),
            "scales": self.scales != "none",
        }
        return tuple(name for name in FEATURES if used[name])


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device, as far as choosing needs it. ``shared_memory`` is in bytes per program; ``triton`` the version or None."""

    type: str
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    sm_count: int = 1
    shared_memory: int = 0
    capturing: bool = False
    triton: str | None = None
    interpreted: bool = False

    @classmethod
    def of(cls, device: torch.device) -> DeviceInfo:
        """The facts of a real device and, on CUDA, whether its current stream is being captured."""
        if device.type != "cuda":
            return _cpu(device.type, os.environ.get("TRITON_INTERPRET") == "1")
        import torch

        index = torch.cuda.current_device() if device.index is None else device.index
        return _cuda(index, torch.cuda.is_current_stream_capturing())

    @classmethod
    def known(cls, arch: str, *, capturing: bool = False) -> DeviceInfo:
        """A GPU by its architecture ("sm90"), without having one. Raises ValueError with the known names."""
        if arch not in _KNOWN:
            raise ValueError(f"arch {arch!r} is not known: use one of {', '.join(_KNOWN)}, or 'cpu'")
        name, capability, sms, shared = _KNOWN[arch]
        return cls("cuda", name, capability, sms, shared, capturing, _triton_version() or "3.6.0", False)

    def has_triton(self, *version: int) -> bool:
        """Whether Triton is there, at least in ``version`` (major, minor)."""
        if self.triton is None:
            return False
        numbers = tuple(int(n) for n in self.triton.split(".")[: len(version)] if n.isdigit())
        return numbers >= version


# NVIDIA CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; SM counts of the named part.
_KNOWN: dict[str, tuple[str, tuple[int, int], int, int]] = {
    "sm80": ("NVIDIA A100", (8, 0), 108, 163 << 10),
    "sm86": ("NVIDIA A10", (8, 6), 72, 99 << 10),
    "sm89": ("NVIDIA L40S", (8, 9), 142, 99 << 10),
    "sm90": ("NVIDIA H200", (9, 0), 132, 227 << 10),
    "sm100": ("NVIDIA B200", (10, 0), 148, 227 << 10),
    "sm120": ("NVIDIA RTX PRO 6000", (12, 0), 188, 99 << 10),
}


@functools.cache
def _triton_version() -> str | None:
    if util.find_spec("triton") is None:
        return None
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def _cpu(kind: str, interpreted: bool) -> DeviceInfo:
    # Under the interpreter a few SMs are assumed, so that prefixes are split and merged there as on a GPU.
    return DeviceInfo(kind, kind, sm_count=4 if interpreted else 1, triton=_triton_version(), interpreted=interpreted)


@functools.cache
def _cuda(index: int, capturing: bool) -> DeviceInfo:
    import torch

    p = torch.cuda.get_device_properties(index)
    shared = getattr(p, "shared_memory_per_block_optin", 0)
    return DeviceInfo("cuda", p.name, (p.major, p.minor), p.multi_processor_count, shared, capturing, _triton_version())
