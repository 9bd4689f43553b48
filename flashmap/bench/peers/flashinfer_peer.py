"""FlashInfer: paged prefill (fa2, with a custom mask for trees) and its MLA wrapper (fa3), planned outside the graph.

It compiles a kernel at first use, which takes a minute or two, unless pack_peers.py --aot brought compiled ones.
"""

from __future__ import annotations

import torch

from flashmap.bench.peers import Call, require
from flashmap.bench.problem import Problem

WORKSPACE_BYTES = 512 << 20
LATENT = 512


class FlashInfer:
    """BatchPrefillWithPagedKVCacheWrapper for GQA, BatchMLAPagedAttentionWrapper for MLA."""

    def __init__(self) -> None:
        import flashinfer

        self.lib, self.version = flashinfer, f"flashinfer {flashinfer.__version__}"
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def bind(self, problem: Problem) -> Call:
        require(problem.point.kv == "bf16", "fp8 is not set up here")
        pages = torch.tensor([0, *problem.pages_of]).cumsum(0).int().to(problem.device)
        return self._mla(problem, pages) if problem.v is None else self._gqa(problem, problem.v, pages)

    def _gqa(self, problem: Problem, values: torch.Tensor, pages: torch.Tensor) -> Call:
        shape, page = problem.point.shape, problem.point.page
        wrapper = self.lib.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend="fa2")
        wrapper.plan(
            problem.cu_seqlens_q, pages, problem.page_list, (problem.kv_lens - 1) % page + 1, shape.heads, shape.kv_heads,
            shape.head_dim, page, custom_mask=None if problem.tree is None else problem.full_mask, causal=problem.tree is None,
            sm_scale=problem.scale, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        return lambda layer: wrapper.run(problem.q, (problem.k[layer], values[layer]), out=problem.out(layer))

    def _mla(self, problem: Problem, pages: torch.Tensor) -> Call:
        require(problem.tree is None, "no tree mask for MLA")
        wrapper = self.lib.mla.BatchMLAPagedAttentionWrapper(self.workspace, backend="fa3")
        wrapper.plan(
            problem.cu_seqlens_q, pages, problem.page_list, problem.kv_lens, problem.point.shape.heads, LATENT,
            problem.point.shape.head_dim - LATENT, problem.point.page, True, problem.scale, torch.bfloat16, torch.bfloat16,
        )  # fmt: skip
        q_latent, q_rope = problem.q[..., :LATENT].contiguous(), problem.q[..., LATENT:].contiguous()
        keys = problem.k.squeeze(3)  # [layers, pages, page, 576]
        return lambda layer: wrapper.run(q_latent, q_rope, keys[layer, ..., :LATENT], keys[layer, ..., LATENT:], out=problem.out(layer))
