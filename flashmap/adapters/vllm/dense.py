"""Dense backends with verify batches served by the op: a mixin for the implementation and one for the metadata builder.

``forward`` is all that changes: the KV write, prefill, decode and metadata stay vLLM's. A batch of verification goes to the op whole.
Of a mixed batch its first requests do, up to the first prefill, which the builder knows from the host's copy of the
lengths; the rest goes to vLLM's ``forward``. A subclass only because vLLM's registry (contract: ``register_backend``) offers no finer
hook; it can go when vLLM lets a plugin choose a kernel per batch.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from flashmap.adapters import observe
from flashmap.adapters.serving import Batch, checking
from flashmap.adapters.vllm import translate
from flashmap.adapters.vllm.serve import ROLE, SERVING, Builder, Parent, layer_name, left, missing_attributes
from flashmap.core.inputs import PagedKV, aligned
from flashmap.core.request import DeviceInfo, VerifyRequest

_PART = "flashmap_part"  # on vLLM's metadata of a mixed batch, so that it lives and dies with it


class DenseImpl(Parent):
    """``forward`` asks dispatch about each verify batch and runs the winner, or lets vLLM's kernel run."""

    flashmap_kernel: ClassVar[str]  # what dispatch calls vLLM's kernel
    flashmap_lengths: tuple[int, ...] | None = None
    flashmap_invariant = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flashmap_missing = missing_attributes(self, translate.DENSE_ATTRIBUTES, self.flashmap_kernel)

    def flashmap_built(self, lengths: tuple[int, ...], threshold: int | None, vllm_config: Any) -> None:
        """Called by the builder."""
        from vllm import envs

        self.flashmap_lengths = lengths
        self.flashmap_invariant = bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))

    def flashmap_request(
        self,
        dtype: torch.dtype,
        requests: int,
        max_query_len: int,
        page_size: int,
        max_kv_len: int,
        metadata: Any = None,
        aligned: bool | None = None,
    ) -> VerifyRequest:
        """``aligned`` None: as it will be for a cache that is not there yet."""
        aligned = translate.side_by_side_aligned(self, dtype) if aligned is None else aligned
        return translate.dense_request(
            self, dtype, num_requests=requests, max_query_len=max_query_len, page_size=page_size, max_kv_len=max_kv_len,
            window=translate.window(self, metadata), aligned=aligned,
        )  # fmt: skip

    def flashmap_aligned(self, layer: Any, kv_cache: torch.Tensor) -> bool:
        """Of what ``flashmap_kv`` will give."""
        return all(map(aligned, translate.side_by_side(self, kv_cache)))

    def flashmap_kv(self, layer: Any, kv_cache: torch.Tensor, metadata: Any, requests: int) -> PagedKV | str:
        """The cache as the op takes it, or a code."""
        return translate.strided_kv(self, kv_cache, metadata.block_table[:requests], metadata.seq_lens[:requests])

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

        def engine(into: torch.Tensor, metadata: Any = attn_metadata, start: int = 0) -> Any:
            q, k, v = (None if t is None else t[start:] for t in (query, key, value)) if start else (query, key, value)
            return parent(layer, q, k, v, kv_cache, metadata, into, output_scale, output_block_scale)

        scale = output_scale if output_scale is not None else output_block_scale
        part = self._flashmap_part(query, kv_cache, attn_metadata, output, scale)
        if isinstance(part, str):
            left(self.flashmap_kernel, part)
            return engine(output)  # type: ignore[no-any-return]
        longest = translate.bound(part.longest, self.flashmap_lengths)
        assert longest is not None
        page_size = kv_cache.shape[2]
        request = self.flashmap_request(
            output.dtype, part.requests, longest, page_size, attn_metadata.block_table.shape[1] * page_size, attn_metadata,
            self.flashmap_aligned(layer, kv_cache),
        )  # fmt: skip
        winner = SERVING.choose(request, DeviceInfo.of(query.device), self.flashmap_kernel, ROLE)
        if winner is None:
            return engine(output)  # type: ignore[no-any-return]
        ours = output[: part.rows].view(part.rows, self.num_heads, self.head_size)
        batch = self._flashmap_batch(layer, query[: part.rows], kv_cache, attn_metadata, part, request, longest, ours)
        if isinstance(batch, str):
            left(self.flashmap_kernel, batch)
            return engine(output)  # type: ignore[no-any-return]

        scratch = None
        if checking(query.device):
            scratch = torch.empty_like(output)
            engine(scratch)
        if not SERVING.run(batch, winner, self.flashmap_kernel, ROLE, ours):
            return engine(output)  # type: ignore[no-any-return]
        if scratch is not None:
            observe.record(layer_name(layer), ours, scratch[: part.rows].view_as(ours))
        if part.rows < attn_metadata.num_actual_tokens:
            engine(output[part.rows :], translate.rest(attn_metadata, part), part.rows)
        return output

    def _flashmap_part(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor, output_scale: Any
    ) -> translate.Part | str:
        """The requests that the op can serve, or the code of why it serves none."""
        if metadata is None:
            return "metadata"
        if self.flashmap_missing:
            return "contract"
        rows, longest = metadata.num_actual_tokens, metadata.max_query_len
        part = translate.Part(metadata.seq_lens.shape[0], rows, longest, rows)
        code = translate.length_reason(longest, self.flashmap_lengths)
        if code == "prefill":
            part = getattr(metadata, _PART, None)  # type: ignore[assignment]
            code = None if part is not None and part.of_rows == rows else code
        if code is None and self.flashmap_invariant:
            code = "batch_invariant"
        return code or translate.dense_reason(self, query, kv_cache, metadata, output, output_scale) or part

    def _flashmap_batch(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        part: translate.Part,
        request: VerifyRequest,
        longest: int,
        out: torch.Tensor,
    ) -> Batch | str:
        kv = self.flashmap_kv(layer, kv_cache, metadata, part.requests)
        if isinstance(kv, str):
            return kv
        scales = {}
        if translate.is_fp8(self):
            scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
            if any(scale.numel() != 1 for scale in scales.values()):
                return "scales"
        if query.dtype != out.dtype:
            query = translate.plain_query(query, out.dtype, layer._q_scale)
        batch = Batch(
            query.view(out.shape),
            kv,
            {
                "cu_seqlens_q": metadata.query_start_loc[: part.requests + 1],
                "max_query_len": longest,
                "scale": self.scale,
                "softcap": translate.softcap(self),
                "window": request.window,
                "sinks": self.sinks,
                **scales,
            },
        )
        return batch if SERVING.accepts(request, batch, self.flashmap_kernel, ROLE, out) else "input"


class DenseBuilder(Builder):
    """Also tells the verify requests of a mixed batch from its prefill.

    Nothing of a step is kept but host numbers of mixed batches, which no graph has: what 0.33 promises of the metadata that it
    updates inside graphs (``supports_draft_decode_metadata_update``) stays true.
    """

    _flashmap_splits: tuple[int, ...] = ()

    def flashmap_before(self, vllm_config: Any, ours: bool) -> None:
        speculative = vllm_config.speculative_config
        # Adaptive verification (0.33): the device's lengths are not the host's, so that nothing on the host tells the requests apart.
        if ours and not getattr(speculative, "enable_adaptive_verification", False):
            self._flashmap_splits = translate.lengths(speculative)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._flashmap_splits:  # vLLM's runner then puts the verify requests of a batch first
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        common = common_attn_metadata
        if self._flashmap_splits and common.max_query_len > self._flashmap_splits[-1]:
            setattr(metadata, _PART, translate.Part.of(common.query_start_loc_cpu[: common.num_reqs + 1], self._flashmap_splits))
        return metadata
