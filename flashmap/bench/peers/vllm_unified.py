"""vLLM's Triton unified_attention, what its TRITON_ATTN backend runs. A tree goes as one bias for the whole batch."""

from __future__ import annotations

import torch

from flashmap.bench.peers import Call, require
from flashmap.bench.problem import Problem


class Unified:
    """The 2-D kernel: its split one is for single query tokens."""

    def __init__(self) -> None:
        import vllm
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        self.run, self.version = unified_attention, f"vllm {vllm.__version__}"

    def bind(self, problem: Problem) -> Call:
        values = problem.v
        require(values is not None, "no MLA")
        assert values is not None
        require(problem.point.kv == "bf16", "fp8 is not set up here")
        bias = None
        if problem.tree is not None:
            same = bool((problem.tree == problem.tree[0]).all())
            require(same and problem.point.spread != "ragged", "one tree bias for the whole batch: try --same-tree")
            bias = torch.zeros(problem.tree.shape[1:], device=problem.device).masked_fill_(~problem.tree[0], float("-inf"))

        def call(layer: int) -> torch.Tensor:
            out = problem.out(layer)
            self.run(
                problem.q, problem.k[layer], values[layer], out, problem.cu_seqlens_q, problem.max_query_len, problem.kv_lens,
                problem.max_kv_len, problem.scale, True, (-1, -1), problem.block_table, 0.0, None, None, None, qq_bias=bias,
            )  # fmt: skip
            return out

        return call
