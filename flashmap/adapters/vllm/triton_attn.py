"""TRITON_ATTN with verify batches served by the op. vLLM's registry imports this file, through gate.py, when it asks for the backend."""

from __future__ import annotations

from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl, TritonAttentionMetadataBuilder

from flashmap.adapters.vllm.dense import DenseBuilder, DenseImpl


class FlashMapTritonAttentionImpl(DenseImpl, TritonAttentionImpl):
    flashmap_kernel = "vllm.triton_attn"


class FlashMapTritonAttentionMetadataBuilder(DenseBuilder, TritonAttentionMetadataBuilder):
    flashmap_impl = FlashMapTritonAttentionImpl


class FlashMapTritonAttentionBackend(TritonAttentionBackend):
    """vLLM's TRITON_ATTN, with our implementation and builder."""

    @staticmethod
    def get_impl_cls() -> type[FlashMapTritonAttentionImpl]:
        return FlashMapTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlashMapTritonAttentionMetadataBuilder]:
        return FlashMapTritonAttentionMetadataBuilder
