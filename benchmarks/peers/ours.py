"""Our op, as a participant: one implementation by name, or the automatic choice."""

from __future__ import annotations

from benchmarks.peers import Call, Skip
from benchmarks.problem import Problem


class Ours:
    """`impl`: None is automatic. `draft`: "cache" or "separate". `layout`: that of the tree mask."""

    def __init__(self, impl: str | None = None, draft: str = "cache", layout: str = "qlen") -> None:
        import flashmap

        self.impl, self.draft, self.layout, self.version = impl, draft, layout, flashmap.__version__

    def bind(self, problem: Problem) -> Call:
        from flashmap.core import Declined, PagedKV, TreeMask, verify_attention

        lens = problem.kv_lens if self.draft == "cache" else problem.kv_prefix_lens
        caches = [
            PagedKV(
                problem.k[layer],
                None if problem.v is None else problem.v[layer],
                problem.block_table,
                lens,
                v_head_dim=problem.point.shape.v_head_dim if problem.v is None else None,
            )
            for layer in range(problem.layers)
        ]
        mask = None
        if problem.tree is not None:
            data = {"qlen": lambda: problem.tree.flatten(), "full": lambda: problem.full_mask, "packed": lambda: problem.packed_mask}
            mask = TreeMask(data[self.layout](), self.layout)

        def call(layer: int):
            extra = {}
            if self.draft == "separate":
                extra["draft_kv"] = (problem.draft_k[layer], None if problem.v is None else problem.draft_v[layer])
            return verify_attention(
                problem.q,
                caches[layer],
                cu_seqlens_q=problem.cu_seqlens_q,
                max_query_len=problem.max_query_len,
                mask=mask,
                out=problem.out(layer),
                impl=self.impl,
                **extra,
            )

        try:  # compiles, and takes the scratch that capture needs
            call(0)
        except Declined as error:
            raise Skip(f"declined: {error}") from error
        return call
