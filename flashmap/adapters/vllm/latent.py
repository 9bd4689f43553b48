"""MLA backends with verify batches served by the op: a mixin for the implementation and two for metadata builders.

vLLM splits a batch itself: its first requests go to ``forward_mqa``, which is all that changes, and attends in latent space;
the rest, prefill, to ``forward_mha``, where only what looks like verification is counted. Kernels made for one query token a
request (TRITON_MLA, CPU_MLA) have vLLM send verify batches to prefill, or show them row by row. Where dispatch chooses an
implementation of ours, ``VarlenBuilder`` says that decode takes any lengths; elsewhere it stays as it is, so that vLLM does what it does without us.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from flashmap.adapters import observe
from flashmap.adapters.serving import Batch, checking
from flashmap.adapters.vllm import translate
from flashmap.adapters.vllm.serve import ROLE, SERVING, Builder, Parent, layer_name, left, missing_attributes
from flashmap.core import dispatch
from flashmap.core.inputs import aligned
from flashmap.core.request import DeviceInfo, VerifyRequest


class LatentImpl(Parent):
    """``forward_mqa`` serves verify batches with the op; ``forward_mha`` only counts those that went to vLLM's prefill."""

    flashmap_kernel: ClassVar[str]  # what dispatch calls vLLM's kernel
    flashmap_single_rows: ClassVar[bool] = False  # vLLM's kernel takes one query token a request

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flashmap_lengths: tuple[int, ...] | None = None
        self.flashmap_bound = 1  # the most query tokens that a request in forward_mqa has
        self.flashmap_most: int | None = None  # rows that vLLM's kernel has scratch for
        self.flashmap_dtype: torch.dtype | None = None  # the model's, in which a quantised query is answered
        self.flashmap_invariant = False
        self.flashmap_missing = missing_attributes(self, translate.LATENT_ATTRIBUTES, self.flashmap_kernel)

    def flashmap_built(self, lengths: tuple[int, ...], threshold: int, vllm_config: Any) -> None:
        """Called by the builder."""
        from vllm import envs

        self.flashmap_lengths, self.flashmap_bound = lengths, threshold
        self.flashmap_most, self.flashmap_dtype = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.dtype
        self.flashmap_invariant = bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))

    def flashmap_request(
        self, dtype: torch.dtype, requests: int, max_query_len: int, page_size: int, max_kv_len: int, aligned: bool = True
    ) -> VerifyRequest:
        return translate.latent_request(
            self, dtype, num_requests=requests, max_query_len=max_query_len, page_size=page_size, max_kv_len=max_kv_len, aligned=aligned
        )

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache, decode = kv_c_and_k_pe_cache, attn_metadata.decode
        given = q[0] if isinstance(q, tuple) else q
        dtype = given.dtype if given.dtype != translate.FP8 or self.flashmap_dtype is None else self.flashmap_dtype
        longest = translate.latent_bound(attn_metadata, self.flashmap_bound)
        code = self._flashmap_reason(given.dtype, dtype, cache, attn_metadata, longest)
        if code is not None:
            left(self.flashmap_kernel, code)
            return self._flashmap_engine(q, cache, attn_metadata, layer)
        kv = translate.latent_kv(self, cache, decode)
        most = translate.bound(longest, self.flashmap_lengths)
        assert most is not None
        request = self.flashmap_request(dtype, kv.num_requests, most, kv.page_size, kv.max_kv_len, aligned(kv.k))
        winner = SERVING.choose(request, DeviceInfo.of(cache.device), self.flashmap_kernel, ROLE)
        if winner is None:
            return self._flashmap_engine(q, cache, attn_metadata, layer)

        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        if query.dtype != dtype:
            query = translate.plain_query(query, dtype, layer._q_scale)
        ours = query.new_empty(query.shape[0], query.shape[1], self.kv_lora_rank)
        batch = Batch(
            query,
            kv,
            {
                "cu_seqlens_q": attn_metadata.query_start_loc[: kv.num_requests + 1],
                "max_query_len": most,
                "scale": self.scale,
                "k_scale": layer._k_scale if translate.is_fp8(self) else 1.0,
            },
        )
        if not SERVING.accepts(request, batch, self.flashmap_kernel, ROLE, ours):
            left(self.flashmap_kernel, "input")
            return self._flashmap_engine(q, cache, attn_metadata, layer)
        if not SERVING.run(batch, winner, self.flashmap_kernel, ROLE, ours):
            return self._flashmap_engine(q, cache, attn_metadata, layer)
        if checking(cache.device):
            observe.record(layer_name(layer), ours, self._flashmap_engine(q, cache, attn_metadata, layer)[0])
        return ours, None

    def forward_mha(self, *args: Any, **kwargs: Any) -> Any:
        metadata = kwargs["attn_metadata"] if "attn_metadata" in kwargs else args[4]
        left(self.flashmap_kernel, self._flashmap_prefill_code(metadata))
        return super().forward_mha(*args, **kwargs)

    def _flashmap_reason(self, query: torch.dtype, dtype: torch.dtype, cache: torch.Tensor, metadata: Any, longest: int) -> str | None:
        if self.flashmap_missing:
            return "contract"
        code = translate.length_reason(longest, self.flashmap_lengths)
        if code is None and metadata.num_decode_tokens == metadata.num_decodes:  # one token each, or a graph's filling
            code = "decode"
        if code is None and self.flashmap_invariant:
            code = "batch_invariant"
        return code or translate.latent_reason(self, query, dtype, cache, metadata)

    def _flashmap_engine(self, q: Any, cache: torch.Tensor, metadata: Any, layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """vLLM's decode kernel. Where it takes one token a request, a verify batch is shown to it token by token, as many as it has scratch for."""
        rows = (q[0] if isinstance(q, tuple) else q).shape[0]
        causal = getattr(metadata, "causal", True) is True  # blocks that are not (0.33) are uniform, and vLLM lays them out itself
        if not self.flashmap_single_rows or not causal or rows == metadata.decode.seq_lens.shape[0]:
            return super().forward_mqa(q, cache, metadata, layer)  # type: ignore[no-any-return]
        table, lens = translate.row_by_row(metadata, rows)
        step = self.flashmap_most or rows
        parts = []
        for i in range(0, rows, step):
            decode = dataclasses.replace(metadata.decode, block_table=table[i : i + step], seq_lens=lens[i : i + step])
            some = tuple(part[i : i + step] for part in q) if isinstance(q, tuple) else q[i : i + step]
            parts.append(super().forward_mqa(some, cache, dataclasses.replace(metadata, decode=decode), layer))
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs), None if lses[0] is None else torch.cat(lses)

    def _flashmap_prefill_code(self, metadata: Any) -> str:
        """Verify batches come here only where the builder left them to vLLM: a few tokens each, behind a cached prefix."""
        prefill = metadata.prefill
        code = translate.length_reason(prefill.max_query_len, self.flashmap_lengths)
        if code is not None or prefill.chunked_context is None or self.flashmap_missing:
            return code or ("contract" if self.flashmap_missing else "prefill")
        table = prefill.block_table
        request = self.flashmap_request(prefill.output_dtype, table.shape[0], prefill.max_query_len, 1, table.shape[1])
        decision = dispatch.route(request, DeviceInfo.of(table.device), self.flashmap_kernel)
        return "prefill" if decision.winner else decision.reasons[0].code


class VarlenBuilder(Builder):
    """Takes verify batches for decode, of any lengths, where dispatch says that they are ours."""

    def flashmap_before(self, vllm_config: Any, ours: bool) -> None:
        from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport

        if ours:
            self.query_len_support = QueryLenSupport.VARLEN
