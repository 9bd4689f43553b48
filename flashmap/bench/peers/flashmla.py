"""FlashMLA as vLLM builds it: chains on latent caches with pages of 64. Its plan is made in the first call and kept."""

from __future__ import annotations

import torch

from flashmap.bench.peers import Call, require
from flashmap.bench.problem import Problem


class FlashMla:
    """flash_mla_with_kvcache, causal."""

    def __init__(self) -> None:
        import vllm
        import vllm._flashmla_C  # first, so that a failure says why
        from vllm.v1.attention.ops import flashmla

        supported, reason = flashmla.is_flashmla_dense_supported()
        require(supported, reason or "not supported")
        self.lib, self.version = flashmla, f"vllm {vllm.__version__}"

    def bind(self, problem: Problem) -> Call:
        point = problem.point
        require(point.shape.latent, "for latent (MLA) caches")
        require(not point.tree, "no tree mask")
        require(point.page == 64, "page size 64 only")
        require(point.kv == "bf16", "the fp8 call wants fp8 queries")
        require(point.spread != "ragged", "one query length for all requests")
        q = problem.q.view(point.bs, point.length, point.shape.heads, point.shape.head_dim)
        plan, _ = self.lib.get_mla_metadata()

        def call(layer: int) -> torch.Tensor:
            out, _ = self.lib.flash_mla_with_kvcache(
                q, problem.k[layer], problem.block_table, problem.kv_lens, point.shape.v_head_dim, plan,
                softmax_scale=problem.scale, causal=True,
            )  # fmt: skip
            return out.view(problem.outs.shape[1:])

        return call
