"""vLLM's CUDA backends with ours in front, on a CPU, tested as vLLM tests its own: a paged cache of permuted blocks with a null block,
``builder.build``, ``impl.forward``, and dense torch to compare with.

The classes are those of the installed vLLM. What is no Python there, the engine's own kernels, is written in torch (``attend``), so that
rows that are left to the engine get an answer too, and how often it was asked is counted.
"""

import math
from types import SimpleNamespace
from unittest import mock

import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import fa_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

ENGINE: list[str] = []  # the calls of the engine's own kernels


def attend(q, k, v, starts, lens, table, scale, *, window=None, softcap=0.0, sinks=None, causal=True):
    """[T, Hq, Dv] in fp32, request by request. k [pages, page_size, Hkv, Dk]; window: the keys that a query sees, itself among them."""
    out = torch.zeros(*q.shape[:2], v.shape[-1])
    page, group = k.shape[1], q.shape[1] // k.shape[2]
    for r in range(len(lens)):
        a, b, n = int(starts[r]), int(starts[r + 1]), int(lens[r])
        if a == b:
            continue
        at = torch.arange(n)
        keys, values = (x[table[r].long()[at // page], at % page].float().repeat_interleave(group, 1) for x in (k, v))
        x = torch.einsum("qhd,khd->hqk", q[a:b].float(), keys) * scale
        x = softcap * torch.tanh(x / softcap) if softcap else x
        position = torch.arange(n - (b - a), n)[:, None]
        seen = (at <= position) if causal else torch.ones(b - a, n, dtype=torch.bool)
        seen = seen & (position - at < window) if window else seen
        x = x.masked_fill(~seen, -math.inf)
        if sinks is not None:
            x = torch.cat((x, sinks.float()[:, None, None].expand(-1, b - a, 1)), -1)
        weights = x.softmax(-1).nan_to_num()[..., :n]
        out[a:b] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def _dense_kernel(
    *,
    q,
    k,
    v,
    out,
    cu_seqlens_q,
    seqused_k,
    block_table,
    softmax_scale,
    causal,
    window_size,
    softcap,
    sinks=None,
    s_aux=None,
    k_descale=None,
    v_descale=None,
    **_,
):
    ENGINE.append("dense")
    k, v = (x.float() * d.flatten()[0] if x.dtype == torch.float8_e4m3fn else x for x, d in ((k, k_descale), (v, v_descale)))
    window = window_size[0] + 1 if window_size[0] >= 0 else None
    sinks = s_aux if sinks is None else sinks
    done = attend(q, k, v, cu_seqlens_q, seqused_k, block_table, softmax_scale, window=window, softcap=softcap, sinks=sinks, causal=causal)
    rows = int(cu_seqlens_q[-1])
    out[:rows] = done[:rows].to(out.dtype)


def _rows_kernel(q, k, v, o, lse, table, lens, logits, splits, scale, page_size, **_):
    """Of TRITON_MLA: one query token a request."""
    ENGINE.append("triton_mla")
    o.copy_(attend(q, k, v, torch.arange(len(lens) + 1), lens, table, scale, causal=False))


def _fa3_mla(*, q, k, v, q_v, cu_seqlens_q, seqused_k, block_table, softmax_scale, **_):
    ENGINE.append("flash_attn_mla")
    whole, key = torch.cat((q_v, q), -1), torch.cat((v, k), -1)
    return attend(whole, key, v, cu_seqlens_q, seqused_k, block_table, softmax_scale).to(q.dtype)


def _flashmla(*, q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, **_):
    ENGINE.append("flashmla")
    starts = torch.arange(q.shape[0] + 1) * q.shape[1]
    done = attend(q.flatten(0, 1), k_cache, k_cache[..., :head_dim_v], starts, cache_seqlens, block_table, softmax_scale)
    return done.view(*q.shape[:3], head_dim_v).to(q.dtype), None


for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):  # not there without vLLM's CUDA extensions
    if not hasattr(fa_utils, name):
        setattr(fa_utils, name, None)

from vllm.v1.attention.backends import flash_attn as theirs_flash  # noqa: E402
from vllm.v1.attention.backends import triton_attn as theirs_triton  # noqa: E402
from vllm.v1.attention.backends.mla import flashattn_mla as theirs_fa_mla  # noqa: E402
from vllm.v1.attention.backends.mla import flashmla as theirs_flashmla  # noqa: E402
from vllm.v1.attention.backends.mla import triton_mla as theirs_triton_mla  # noqa: E402

DENSE = ("TRITON_ATTN", "FLASH_ATTN")
LATENT = ("TRITON_MLA", "FLASH_ATTN_MLA", "FLASHMLA")
PATCHES = [
    (theirs_triton, "unified_attention", _dense_kernel),
    (theirs_flash, "flash_attn_varlen_func", _dense_kernel),
    (theirs_flash, "flash_attn_supports_sinks", lambda: True),
    (theirs_flash, "flash_attn_supports_kv_cache_dtype", lambda *a, **k: True),
    (theirs_triton_mla, "decode_attention_fwd", _rows_kernel),
    (theirs_triton_mla, "_compute_num_kv_splits", lambda *a: 1),
    (theirs_triton_mla, "get_current_vllm_config", lambda: None),
    (theirs_triton_mla.current_platform, "num_compute_units", lambda *a: 4),
    (MLACommonBackend, "get_supported_head_sizes", classmethod(lambda cls: [48])),  # 576 takes the interpreter long
    (theirs_fa_mla, "flash_attn_varlen_func", _fa3_mla),
    (theirs_fa_mla, "flash_attn_supports_mla", lambda: True),
    (theirs_flashmla, "is_flashmla_dense_supported", lambda: (True, None)),
    (theirs_flashmla, "get_mla_metadata", lambda *a, **k: (SimpleNamespace(tile_scheduler_metadata=None, num_splits=None), None)),
    (theirs_flashmla, "num_compute_units", lambda *a: 4),
    (theirs_flashmla, "flash_mla_with_kvcache", _flashmla),
]


def patch(monkeypatch):
    """The engine's kernels in torch."""
    for where, name, what in PATCHES:
        monkeypatch.setattr(where, name, what, raising=False)
    ENGINE.clear()


class Rig:
    """One layer of backend ``name`` with its builder. ``requests``: (query tokens, all tokens) of each; dense 8/2 heads of 32, MLA 4 heads,
    latent 32 + 16; ``hnd``: the cache by heads and not by tokens. A case of fp8 has a quantised cache and, if ``quantised``, query."""

    def __init__(
        self, name, requests, *, drafts=3, method="mtp", heads=None, kv_heads=2, dim=32, page=16, hnd=False, dtype=torch.float32, window=None, softcap=None,
        sinks=None, fp8=False, quantised=False, model_len=512, seqs=8, mode=CUDAGraphMode.FULL_AND_PIECEWISE, seed=0, **speculative,
    ):  # fmt: skip
        from flashmap.adapters.vllm import gate

        self.backend, self.requests, self.dtype, self.page = getattr(gate, name), list(requests), dtype, page
        self.mla = name in LATENT
        self.heads, self.kv_heads, self.dk, self.dv = (heads or 4, 1, 48, 32) if self.mla else (heads or 8, kv_heads, dim, dim)
        self.window, self.softcap, self.sinks, self.fp8, self.quantised = window, softcap, sinks, fp8, quantised
        self.draw = torch.Generator().manual_seed(seed)
        self.scale = 1.3 * self.dk**-0.5
        kv_name = "fp8" if fp8 else "auto"
        mla_arguments = dict(
            q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=16, qk_head_dim=40, v_head_dim=24, kv_b_proj=None
        )  # fmt: skip
        more = mla_arguments if self.mla else {"sinks": sinks}
        with set_current_vllm_config(VllmConfig()):
            self.impl = self.backend.get_impl_cls()(
                self.heads, self.dk, self.scale, self.kv_heads, None, window, kv_name, softcap, "decoder", None, **more
            )
        self.impl.dcp_world_size = 1
        self.impl.vllm_flash_attn_version = 3
        self.layer = SimpleNamespace(
            layer_name="layer", impl=self.impl, _q_scale=torch.tensor(0.5), _k_scale=torch.tensor(0.25), _v_scale=torch.tensor(1.0 if self.mla else 2.0),
            prefill_backend=SimpleNamespace(clone=lambda: SimpleNamespace(prepare_metadata=lambda m: None, get_name=lambda: "none")), **mla_arguments,
        )  # fmt: skip
        cache_dtype = torch.uint8 if fp8 else dtype
        spec = MLAAttentionSpec if self.mla else FullAttentionSpec
        windows = {} if self.mla else {"sliding_window": window}  # FLASH_ATTN of 0.26 takes the group's
        self.spec = spec(block_size=page, num_kv_heads=self.kv_heads, head_size=self.dk, dtype=cache_dtype, **windows)
        config = SimpleNamespace(num_speculative_tokens=drafts, method=method, parallel_drafting=False, **speculative) if drafts else None
        self.config = SimpleNamespace(
            speculative_config=config, use_v2_model_runner=False, cache_config=SimpleNamespace(cache_dtype=kv_name, block_size=page),
            model_config=SimpleNamespace(
                dtype=dtype, max_model_len=model_len, rswa_window=None, get_num_attention_heads=lambda *a: self.heads, get_head_size=lambda: self.dk,
                get_num_kv_heads=lambda *a: self.kv_heads, hf_config=SimpleNamespace(model_type="llama"), hf_text_config=SimpleNamespace(**mla_arguments), is_mm_prefix_lm=False,
            ),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1),
            scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=2048), kernel_config=SimpleNamespace(enable_jit_warmup=False),
            attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32, use_prefill_query_quantization=False),
            compilation_config=SimpleNamespace(
                static_forward_context={"layer": self.layer}, cudagraph_mode=mode, cudagraph_capture_sizes=[1, 8, 32], max_cudagraph_capture_size=32,
            ),
        )  # fmt: skip
        self.builder_cls = self.backend.get_builder_cls()
        with mock.patch("vllm.v1.attention.backends.utils.get_layers_from_vllm_config", lambda *a, **k: {}):
            self.builder = self.builder_cls(self.spec, ["layer"], self.config, torch.device("cpu"))
        self._fill(hnd)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.draw).to(self.dtype)

    def _fill(self, hnd):
        """Shuffled blocks; block 0 is the null block. What no request has is NaN, as are the ends of the table's rows."""
        pages = [-(-n // self.page) for _, n in self.requests]
        count = 2 + sum(pages)
        heads, columns = self.kv_heads, self.dk if self.mla else 2 * self.dk
        content = self.normal(count, self.page, heads, columns)
        if self.fp8:
            content = content.clamp(-8, 8).to(torch.float8_e4m3fn)
        free = (1 + torch.randperm(count - 1, generator=self.draw)).tolist()
        self.table = torch.zeros(len(self.requests), max([1, *pages]) + 1, dtype=torch.int32)
        used = torch.zeros(count, self.page, dtype=torch.bool)
        for r, (_, n) in enumerate(self.requests):
            for i in range(pages[r]):
                self.table[r, i] = free.pop()
                used[self.table[r, i], : min(self.page, n - i * self.page)] = True
            self.table[r, pages[r] :] = 0 if not n else count - 1
        if not self.fp8:
            content[~used] = math.nan
        self.content = content
        if self.mla:
            self.cache = content.view(count, self.page, self.dk).contiguous()
        else:  # [pages, heads, page_size, 2 * D] in either order
            self.cache = content.transpose(1, 2).contiguous() if hnd else content.transpose(1, 2)
            self.cache = self.cache.view(torch.uint8) if self.fp8 else self.cache

    def common(self, *, capture=False, causal=True):
        starts = torch.tensor([0, *(q for q, _ in self.requests)]).cumsum(0).int()
        lens = torch.tensor([n for _, n in self.requests], dtype=torch.int32)
        rows = int(starts[-1])
        return CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens.clone(), num_reqs=len(lens), num_actual_tokens=rows,
            max_query_len=max(q for q, _ in self.requests), max_seq_len=512 if capture else int(lens.max()), block_table_tensor=self.table,
            slot_mapping=torch.zeros(rows, dtype=torch.int64), causal=causal, seq_lens_cpu_upper_bound=lens,
        )  # fmt: skip

    def build(self, **more):
        return self.builder.build(0, self.common(**more))

    def query(self, extra=0):
        """[T + extra, Hq, D]: the engine pads."""
        q = self.normal(sum(q for q, _ in self.requests) + extra, self.heads, self.dk)
        return q.clamp(-4, 4).to(torch.float8_e4m3fn) if self.quantised else q

    def forward(self, q, metadata):
        if self.mla:
            rows = metadata.num_decode_tokens
            given = q[:rows] if self.quantised else (q[:rows, :, :32].transpose(0, 1).contiguous().transpose(0, 1), q[:rows, :, 32:])
            cache = self.cache.view(torch.float8_e4m3fn) if self.fp8 else self.cache
            out, lse = self.impl.forward_mqa(given, cache, metadata, self.layer)
            assert lse is None or lse.shape[0] == rows
            return out
        out = torch.full((q.shape[0], self.heads, self.dv), 9.0, dtype=self.dtype)
        key = torch.zeros(q.shape[0], self.kv_heads, self.dk, dtype=self.dtype)
        assert self.impl.forward(self.layer, q, key, key, self.cache, metadata, out) is out
        return out

    def reference(self, q):
        """Of all requests, in fp32."""
        q = q.float() * self.layer._q_scale if self.quantised else q
        content = self.content.float()
        k = content[..., : self.dk] * (self.layer._k_scale if self.fp8 else 1)
        v = k[..., : self.dv] if self.mla else content[..., self.dk :] * (self.layer._v_scale if self.fp8 else 1)
        common = self.common()
        return attend(
            q,
            k,
            v,
            common.query_start_loc,
            common.seq_lens,
            self.table,
            self.scale,
            window=self.window,
            softcap=self.softcap or 0.0,
            sinks=self.sinks,
        )[: common.num_actual_tokens]
