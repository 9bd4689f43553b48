"""TRITON_MLA with verify batches served by the op. vLLM's registry imports this file, through gate.py, when it asks for the backend."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend, TritonMLAImpl, TritonMLAMetadataBuilder

from flashmap.adapters.vllm.latent import LatentImpl, VarlenBuilder


class FlashMapTritonMLAImpl(LatentImpl, TritonMLAImpl):
    flashmap_kernel = "vllm.triton_mla"
    flashmap_single_rows = True


class FlashMapTritonMLAMetadataBuilder(VarlenBuilder, TritonMLAMetadataBuilder):
    flashmap_impl = FlashMapTritonMLAImpl


class FlashMapTritonMLABackend(TritonMLABackend):
    """vLLM's TRITON_MLA, with our implementation and builder."""

    @staticmethod
    def get_impl_cls() -> type[FlashMapTritonMLAImpl]:
        return FlashMapTritonMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashMapTritonMLAMetadataBuilder]:
        return FlashMapTritonMLAMetadataBuilder
