"""FLASH_ATTN with verify batches served by the op. vLLM's registry imports this file, through gate.py, when it asks for the backend."""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadataBuilder

from flashmap.adapters.vllm.dense import DenseBuilder, DenseImpl


class FlashMapFlashAttentionImpl(DenseImpl, FlashAttentionImpl):
    flashmap_kernel = "vllm.fa3"


class FlashMapFlashAttentionMetadataBuilder(DenseBuilder, FlashAttentionMetadataBuilder):
    flashmap_impl = FlashMapFlashAttentionImpl


class FlashMapFlashAttentionBackend(FlashAttentionBackend):
    """vLLM's FLASH_ATTN, with our implementation and builder."""

    @staticmethod
    def get_impl_cls() -> type[FlashMapFlashAttentionImpl]:
        return FlashMapFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlashMapFlashAttentionMetadataBuilder]:
        return FlashMapFlashAttentionMetadataBuilder
