"""sglang's Triton kernels: what its Triton backend verifies with on NVIDIA, and the split kernel it enables on one AMD chip."""

from __future__ import annotations

import torch

from flashmap.bench.peers import Call, require
from flashmap.bench.problem import Problem


class Extend:
    """extend_attention_fwd, with sglang's full mask for a tree."""

    def __init__(self) -> None:
        import sglang
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        self.run, self.version = extend_attention_fwd, f"sglang {sglang.__version__}"

    def bind(self, problem: Problem) -> Call:
        require(problem.point.kv == "bf16", "fp8 is not set up here")
        arguments = _Arguments(problem)

        def call(layer: int) -> torch.Tensor:
            self.run(*arguments.of(layer), 1.0, 1.0, sm_scale=problem.scale)
            return problem.out(layer)

        return call


class Verify:
    """verify_splitkv_fwd, for MLA verify_shared_kv_fwd: chains only, forced on NVIDIA."""

    def __init__(self) -> None:
        import sglang
        from sglang.kernels.ops.attention import verify_mla, verify_splitkv

        self.gqa, self.mla = verify_splitkv.verify_splitkv_fwd, verify_mla.verify_shared_kv_fwd
        self.version = f"sglang {sglang.__version__}"

    def bind(self, problem: Problem) -> Call:
        require(problem.tree is None, "no tree mask")
        require(problem.point.kv == "bf16", "fp8 is not set up here")
        arguments, run = _Arguments(problem), self.mla if problem.v is None else self.gqa

        def call(layer: int) -> torch.Tensor:
            handled = run(*arguments.of(layer), 1.0, 1.0, sm_scale=problem.scale)
            require(handled is not False, "declined by the kernel")
            return problem.out(layer)

        return call


class _Arguments:
    """The positional arguments that these kernels share."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.draft = problem, (problem.draft_k, problem.draft_v)
        self.mask = (None, None) if problem.tree is None else (problem.full_mask, problem.full_mask_indptr)

    def of(self, layer: int) -> tuple[torch.Tensor | int | bool | None, ...]:
        p, (mask, indptr) = self.problem, self.mask
        return (
            p.q, self.draft[0][layer], self.draft[1][layer], p.out(layer), p.k_slots[layer], p.v_slots[layer], p.cu_seqlens_q,
            p.prefix_indptr, p.prefix_slots, mask, True, indptr, p.max_query_len,
        )  # fmt: skip
