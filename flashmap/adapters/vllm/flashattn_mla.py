"""FLASH_ATTN_MLA with verify batches served by the op. vLLM's registry imports this file, through gate.py, when it asks for the backend."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLABackend, FlashAttnMLAImpl, FlashAttnMLAMetadataBuilder

from flashmap.adapters.vllm.latent import LatentImpl
from flashmap.adapters.vllm.serve import Builder


class FlashMapFlashAttnMLAImpl(LatentImpl, FlashAttnMLAImpl):
    flashmap_kernel = "vllm.fa3"


class FlashMapFlashAttnMLAMetadataBuilder(Builder, FlashAttnMLAMetadataBuilder):
    flashmap_impl = FlashMapFlashAttnMLAImpl


class FlashMapFlashAttnMLABackend(FlashAttnMLABackend):
    """vLLM's FLASH_ATTN_MLA, with our implementation and builder."""

    @staticmethod
    def get_impl_cls() -> type[FlashMapFlashAttnMLAImpl]:
        return FlashMapFlashAttnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashMapFlashAttnMLAMetadataBuilder]:
        return FlashMapFlashAttnMLAMetadataBuilder
