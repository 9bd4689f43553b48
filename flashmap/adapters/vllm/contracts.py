"""What this adapter uses of vLLM, by backend: names and parameters, not versions. Imports nothing of vLLM."""

from __future__ import annotations

from flashmap.adapters.patching import Contract

_BACKENDS = "vllm.v1.attention.backends"
_REGISTRY = f"{_BACKENDS}.registry"
_BASE = "vllm.v1.attention.backend"
_CPU_ATTN = f"{_BACKENDS}.cpu_attn"
_CPU_MLA = f"{_BACKENDS}.mla.cpu_mla"
_MLA = "vllm.model_executor.layers.attention.mla_attention"

COMMON = (
    Contract(f"{_REGISTRY}:register_backend", ("backend", "class_path")),
    Contract(f"{_REGISTRY}:AttentionBackendEnum.get_path"),
    Contract(f"{_REGISTRY}:AttentionBackendEnum.is_overridden"),
    Contract(f"{_REGISTRY}:AttentionBackendEnum.clear_override"),
)
_FORWARD = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale")
_DENSE_FIELDS = (
    "num_actual_tokens",
    "max_query_len",
    "query_start_loc",
    "max_seq_len",
    "seq_lens",
    "block_table",
    "slot_mapping",
    "causal",
)
_INIT = ("kv_cache_spec", "layer_names", "vllm_config", "device")


def _dense(name: str, module: str, stem: str) -> tuple[Contract, ...]:
    """A dense CUDA backend of vLLM's: ``stem`` is what its classes' names begin with."""
    return (
        Contract(f"{_REGISTRY}:AttentionBackendEnum.{name}"),
        Contract(f"{module}:{stem}Backend.get_impl_cls"),
        Contract(f"{module}:{stem}Backend.get_builder_cls"),
        Contract(
            f"{module}:{stem}Impl.__init__",
            uses=("num_heads", "num_kv_heads", "head_size", "scale", "alibi_slopes", "sliding_window", "logits_soft_cap", "attn_type", "kv_cache_dtype", "sinks"),
        ),
        Contract(f"{module}:{stem}Impl.forward", _FORWARD, uses=("transpose", "split", "_k_scale", "_v_scale", "_q_scale")),
        Contract(f"{module}:{stem}Metadata", fields=(*_DENSE_FIELDS, "scheduler_metadata")),
        Contract(f"{module}:{stem}MetadataBuilder.__init__", _INIT),
        Contract(f"{module}:{stem}MetadataBuilder.build", ("common_prefix_len", "common_attn_metadata", "fast_build")),
        *_BUILDER,
        Contract(f"{_BASE}:CommonAttentionMetadata", fields=("num_reqs", "max_query_len", "query_start_loc_cpu")),
    )  # fmt: skip


def _latent(name: str, module: str, stem: str) -> tuple[Contract, ...]:
    """An MLA CUDA backend of vLLM's."""
    return (
        Contract(f"{_REGISTRY}:AttentionBackendEnum.{name}"),
        Contract(f"{module}:{stem}Backend.get_impl_cls"),
        Contract(f"{module}:{stem}Backend.get_builder_cls"),
        Contract(f"{module}:{stem}Impl.__init__"),
        Contract(f"{module}:{stem}Impl.forward_mqa", ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"), uses=("kv_lora_rank", "scale", "decode")),
        Contract(f"{module}:{stem}MetadataBuilder.__init__", _INIT),
        *_BUILDER,
        *_MLA_COMMON,
        Contract(f"{_MLA}:MLACommonImpl.forward_mha", ("attn_metadata",)),
    )  # fmt: skip


_BUILDER = (
    Contract(f"{_BASE}:AttentionMetadataBuilder.get_cudagraph_support", ("vllm_config", "kv_cache_spec")),
    Contract(f"{_BASE}:AttentionMetadataBuilder._init_reorder_batch_threshold", ("reorder_batch_threshold", "supports_spec_as_decode")),
    Contract(f"{_BASE}:AttentionCGSupport.UNIFORM_BATCH"),
)
_MLA_COMMON = (
    Contract(f"{_MLA}:QueryLenSupport.VARLEN"),
    Contract(f"{_MLA}:MLACommonMetadataBuilder.query_len_support"),
    Contract(f"{_MLA}:MLACommonMetadataBuilder.reorder_batch_threshold"),
    Contract(
        f"{_MLA}:MLACommonMetadata", fields=("num_decodes", "num_decode_tokens", "max_query_len", "query_start_loc", "prefill", "decode")
    ),
    Contract(f"{_MLA}:MLACommonDecodeMetadata", fields=("block_table", "seq_lens")),
    Contract(f"{_MLA}:MLACommonPrefillMetadata", fields=("max_query_len", "chunked_context", "block_table", "output_dtype")),
)

CONTRACTS = {
    "CPU_ATTN": (
        Contract(f"{_REGISTRY}:AttentionBackendEnum.CPU_ATTN"),
        Contract(f"{_CPU_ATTN}:CPUAttentionBackend.get_impl_cls"),
        Contract(f"{_CPU_ATTN}:CPUAttentionBackendImpl.do_kv_cache_update", ("layer", "key", "value", "kv_cache", "slot_mapping")),
        Contract(f"{_CPU_ATTN}:CPUAttentionBackendImpl.forward", _FORWARD),
        Contract(f"{_CPU_ATTN}:CPUAttentionMetadata", fields=_DENSE_FIELDS),
    ),
    "CPU_MLA": (
        Contract(f"{_REGISTRY}:AttentionBackendEnum.CPU_MLA"),
        Contract(f"{_CPU_MLA}:CPUMLABackend.get_impl_cls"),
        Contract(f"{_CPU_MLA}:CPUMLABackend.get_builder_cls"),
        Contract(f"{_CPU_MLA}:CPUMLAImpl.forward_mqa", ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")),
        Contract(f"{_CPU_MLA}:CPUMLAImpl.forward_mha", ("attn_metadata",)),
        *_MLA_COMMON,
    ),
    "TRITON_ATTN": _dense("TRITON_ATTN", f"{_BACKENDS}.triton_attn", "TritonAttention"),
    "FLASH_ATTN": _dense("FLASH_ATTN", f"{_BACKENDS}.flash_attn", "FlashAttention"),
    "TRITON_MLA": _latent("TRITON_MLA", f"{_BACKENDS}.mla.triton_mla", "TritonMLA"),
    "FLASH_ATTN_MLA": _latent("FLASH_ATTN_MLA", f"{_BACKENDS}.mla.flashattn_mla", "FlashAttnMLA"),
    "FLASHMLA": _latent("FLASHMLA", f"{_BACKENDS}.mla.flashmla", "FlashMLA"),
}
