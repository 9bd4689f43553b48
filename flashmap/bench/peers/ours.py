"""Our op, as a participant: one implementation by name, or the automatic choice."""

from __future__ import annotations

from typing import Any

import torch

from flashmap.bench.peers import Call, Skip
from flashmap.bench.problem import Problem


class Ours:
    """`impl`: None is automatic. `draft`: "cache" or "separate". `layout`: that of the tree mask."""

    def __init__(self, impl: str | None = None, draft: str = "cache", layout: str = "qlen") -> None:
        import flashmap

        self.impl, self.draft, self.layout, self.version = impl, draft, layout, flashmap.__version__
        self.chosen: str | None = None  # who served the problem that was bound last

    def bind(self, problem: Problem) -> Call:
        from flashmap.core import Declined, DeviceInfo, PagedKV, TreeMask, VerifyRequest, dispatch, verify_attention

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
            data = {"qlen": lambda: problem.allowed.flatten(), "full": lambda: problem.full_mask, "packed": lambda: problem.packed_mask}
            mask = TreeMask(data[self.layout](), self.layout)

        def arguments(layer: int) -> dict[str, Any]:
            found: dict[str, Any] = {"cu_seqlens_q": problem.cu_seqlens_q, "max_query_len": problem.max_query_len, "mask": mask}
            if self.draft == "separate":
                found["draft_kv"] = (problem.draft_k[layer], None if problem.v is None else problem.draft_v[layer])
            return found | {"out": problem.out(layer), "impl": self.impl}

        def call(layer: int) -> torch.Tensor:
            out = verify_attention(problem.q, caches[layer], **arguments(layer))
            assert isinstance(out, torch.Tensor)
            return out

        try:  # compiles, and takes the scratch that capture needs
            call(0)
        except Declined as error:
            raise Skip(f"declined: {error}") from error
        request = VerifyRequest.of(problem.q, caches[0], **arguments(0))
        self.chosen = dispatch.route(request, DeviceInfo.of(problem.device), None).winner if self.impl is None else self.impl
        return call
