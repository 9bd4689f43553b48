"""The split-KV verify kernel that this project grew from: $FLASHMAP_PEERS/seed_splitkv.py, which no package has."""

from __future__ import annotations

import torch

from flashmap.bench.peers import Call, require
from flashmap.bench.problem import Problem


class Seed:
    """SplitKVVerify with its own defaults; the mask in sglang's full layout."""

    version = "seed"

    def __init__(self) -> None:
        from seed_splitkv import SplitKVVerify

        self.kernel = SplitKVVerify()

    def bind(self, problem: Problem) -> Call:
        point = problem.point
        require(not point.shape.latent, "MLA takes more shared memory (256 to 384 kB) than there is")
        require(point.kv == "bf16", "no fp8 cache")
        require(point.spread != "ragged", "one query length for all requests")
        mask = (None, None) if problem.tree is None else (problem.full_mask, problem.full_mask_indptr)
        draft_k, draft_v = problem.draft_k, problem.draft_v
        indices = problem.prefix_slots

        def call(layer: int) -> torch.Tensor:
            out = problem.out(layer)
            handled = self.kernel(
                problem.q, draft_k[layer], draft_v[layer], out, problem.k_slots[layer], problem.v_slots[layer],
                problem.cu_seqlens_q, problem.prefix_indptr, indices, mask[0], True, mask[1], point.length, sm_scale=problem.scale,
            )  # fmt: skip
            require(handled, "declined by the kernel")
            return out

        return call
