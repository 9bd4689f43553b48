"""The paths by which vLLM's registry finds our CUDA backends: ``flashmap.adapters.vllm.gate.TRITON_ATTN`` and so on.

Registering such a path imports nothing. vLLM resolves it in a process that needs the backend: then the contract is probed, and the
class is ours, or vLLM's own with one WARNING. An error of vLLM's own module (a kernel library that is not there) passes, as
without us: vLLM goes on to its next backend.
"""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from typing import Any

from flashmap.adapters.patching import broken, probe, strict
from flashmap.adapters.vllm.contracts import COMMON, CONTRACTS
from flashmap.core.interface import Reason

logger = logging.getLogger(__name__)

OURS = {
    "TRITON_ATTN": "flashmap.adapters.vllm.triton_attn:FlashMapTritonAttentionBackend",
    "FLASH_ATTN": "flashmap.adapters.vllm.flash_attn:FlashMapFlashAttentionBackend",
    "TRITON_MLA": "flashmap.adapters.vllm.triton_mla:FlashMapTritonMLABackend",
    "FLASH_ATTN_MLA": "flashmap.adapters.vllm.flashattn_mla:FlashMapFlashAttnMLABackend",
    "FLASHMLA": "flashmap.adapters.vllm.flashmla:FlashMapFlashMLABackend",
}
# Names of our own, for vLLM versions that take new ones; each is that backend with ours, whatever is hooked under its own name.
NAMED = {"FLASHMAP": "TRITON_ATTN", "FLASHMAP_MLA": "TRITON_MLA"}
declined: dict[str, Reason] = {}  # the backends whose contract is broken in this process


def __getattr__(name: str) -> Any:
    name = NAMED.get(name, name)
    if name not in OURS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _resolve(name)


@functools.cache
def _resolve(name: str) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    module, _, path = AttentionBackendEnum[name].value.rpartition(".")
    theirs = getattr(import_module(module), path)
    try:
        missing = probe((*COMMON, *CONTRACTS[name]))
        if not missing:
            ours, _, path = OURS[name].partition(":")
            return getattr(import_module(ours), path)
    except Exception as error:
        missing = (f"deriving from it failed ({type(error).__name__}: {error})",)
    declined[name] = broken(name, missing)
    text = f"flashmap leaves a part of vLLM alone: {declined[name]}"
    if strict():
        raise RuntimeError(text)
    logger.warning("%s", text)
    return theirs


def named(name: str) -> Any:
    """The member of vLLM's enumeration of that name of ours, added where it is missing.

    A spawned engine process unpickles its configuration before it loads plugins, so a pickled member calls this.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if name not in AttentionBackendEnum.__members__:
        register_backend(name, f"{__name__}.{name}")
        AttentionBackendEnum[name].__reduce_ex__ = lambda protocol: (named, (name,))
    return AttentionBackendEnum[name]


def forget() -> None:
    """Probe anew: for an installation that is removed."""
    _resolve.cache_clear()
    declined.clear()
