"""FLASHMLA with verify batches served by the op. vLLM's registry imports this file, through gate.py, when it asks for the backend."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend, FlashMLAImpl, FlashMLAMetadataBuilder

from flashmap.adapters.vllm.latent import LatentImpl
from flashmap.adapters.vllm.serve import Builder


class FlashMapFlashMLAImpl(LatentImpl, FlashMLAImpl):
    flashmap_kernel = "vllm.flashmla"


class FlashMapFlashMLAMetadataBuilder(Builder, FlashMLAMetadataBuilder):
    flashmap_impl = FlashMapFlashMLAImpl


class FlashMapFlashMLABackend(FlashMLABackend):
    """vLLM's FLASHMLA, with our implementation and builder."""

    @staticmethod
    def get_impl_cls() -> type[FlashMapFlashMLAImpl]:
        return FlashMapFlashMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashMapFlashMLAMetadataBuilder]:
        return FlashMapFlashMLAMetadataBuilder
