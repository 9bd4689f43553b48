"""FlashAttention 3 as vLLM builds it: a chain in one call, a tree as two calls and a merge.

MLA: the query's and the cache's rope part (64) go as q and k, the latent part (512) as q_v and v. A tree is what sglang's
fa3 backend runs when topk > 1: the prefix for all of a request's tokens, then each token on its own on the slots of the
draft tokens that it sees (a page table of single slots), then a merge by log-sum-exp.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from flashmap.bench.peers import Call, Skip, require
from flashmap.bench.problem import Problem

LATENT = 512


class Fa3:
    """The causal call; num_splits 0 lets it choose. It plans inside the call."""

    def __init__(self) -> None:
        import vllm

        try:
            from vllm.vllm_flash_attn import flash_attn_interface
        except ImportError as error:  # the package's own message does not say why the library did not load
            module = sys.modules.get("vllm.vllm_flash_attn.flash_attn_interface")
            raise Skip(f"no FA3 in vLLM: {getattr(module, 'FA3_UNAVAILABLE_REASON', error)}") from error
        require(flash_attn_interface.FA3_AVAILABLE, f"no FA3 in vLLM: {flash_attn_interface.FA3_UNAVAILABLE_REASON}")
        self.lib: Any = flash_attn_interface
        self.version = f"vllm {vllm.__version__}"

    def bind(self, problem: Problem) -> Call:
        require(problem.tree is None, "no tree mask (see fa3_cascade)")
        return self._causal(problem, None)

    def _causal(self, problem: Problem, plan: torch.Tensor | None) -> Call:
        tensors = _Split(problem)

        def call(layer: int) -> torch.Tensor:
            q, k, v, q_v = tensors.of(layer)
            return self.lib.flash_attn_varlen_func(
                q, k, v, problem.max_query_len, problem.cu_seqlens_q, problem.max_kv_len, seqused_k=problem.kv_lens, q_v=q_v,
                softmax_scale=problem.scale, causal=True, block_table=problem.block_table, out=problem.out(layer),
                scheduler_metadata=plan, num_splits=0, fa_version=3,
            )  # fmt: skip

        return call


class Fa3Planned(Fa3):
    """The causal call with its plan made once, outside the graph, as vLLM does it for all layers of a step."""

    def bind(self, problem: Problem) -> Call:
        require(problem.tree is None, "no tree mask (see fa3_cascade)")
        shape = problem.point.shape
        plan = self.lib.get_scheduler_metadata(
            problem.point.bs, problem.max_query_len, problem.max_kv_len, shape.heads, shape.kv_heads,
            shape.head_dim - LATENT if shape.latent else shape.head_dim, problem.kv_lens, qkv_dtype=torch.bfloat16,
            headdim_v=shape.v_head_dim, cu_seqlens_q=problem.cu_seqlens_q, page_size=problem.point.page, causal=True, num_splits=0,
        )  # fmt: skip
        return self._causal(problem, plan)


class Fa3Cascade(Fa3):
    """Prefix call, per-token call on the allowed draft slots, merge (vLLM's CUDA kernel, else its Triton kernel)."""

    def __init__(self) -> None:
        super().__init__()
        self.merge, kind = _merge()
        self.version += f", {kind} merge"

    def bind(self, problem: Problem) -> Call:
        require(problem.tree is not None, "for trees (see fa3)")
        tensors, single = _Split(problem), _Split(problem, page=1)
        tokens = problem.q.shape[0]
        counts, table = _allowed_slots(problem)
        each = torch.arange(tokens + 1, dtype=torch.int32, device=problem.device)

        def call(layer: int) -> torch.Tensor:
            q, k, v, q_v = tensors.of(layer)
            common = {"q_v": q_v, "softmax_scale": problem.scale, "causal": False, "return_softmax_lse": True, "fa_version": 3}
            prefix, prefix_lse = self.lib.flash_attn_varlen_func(
                q, k, v, problem.max_query_len, problem.cu_seqlens_q, problem.max_kv_len, seqused_k=problem.kv_prefix_lens,
                block_table=problem.block_table, **common,
            )  # fmt: skip
            _, k, v, _ = single.of(layer)
            draft, draft_lse = self.lib.flash_attn_varlen_func(
                q, k, v, 1, each, table.shape[1], seqused_k=counts, block_table=table, **common
            )
            out = problem.out(layer)
            self.merge(out, prefix, prefix_lse, draft, draft_lse)
            return out

        return call


class _Split:
    """A problem's tensors in FA3's arguments. `page`: view the cache in pages of that size."""

    def __init__(self, problem: Problem, page: int | None = None) -> None:
        require(problem.point.kv == "bf16", "fp8 wants fp8 queries: not the same problem")
        page = page or problem.point.page
        self.k, self.v = _paged(problem.k_slots, page), _paged(problem.v_slots, page)
        self.q, self.q_v = problem.q, None
        if problem.v is None:
            self.k = self.k[..., LATENT:]
            self.q, self.q_v = problem.q[..., LATENT:].contiguous(), problem.q[..., :LATENT].contiguous()

    def of(self, layer: int) -> tuple[torch.Tensor | None, ...]:
        return self.q, self.k[layer], self.v[layer], self.q_v


def _paged(slots: torch.Tensor, page: int) -> torch.Tensor:
    return slots.unflatten(1, (slots.shape[1] // page, page))


def _allowed_slots(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Per token, how many draft tokens it sees, and their slots: int32 [T] and [T, most]."""
    counts, rows, start = [], [], 0
    for r, n in enumerate(problem.query_lens):
        slots = problem.draft_slots[start : start + n]
        for t in range(n):
            rows.append(slots[problem.allowed[r, t, :n]].int())
            counts.append(len(rows[-1]))
        start += n
    table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    # sglang's table is as wide as the draft is long, for every step alike
    table = torch.nn.functional.pad(table, (0, problem.max_query_len - table.shape[1])).contiguous()
    return torch.tensor(counts, dtype=torch.int32, device=problem.device), table


def _merge() -> tuple[Callable[..., object], str]:
    """vLLM's merge of two partial results: its CUDA kernel if it runs here, else its Triton kernel."""
    try:
        from vllm._custom_ops import merge_attn_states

        part, lse = torch.ones(1, 1, 128, device="cuda", dtype=torch.bfloat16), torch.zeros(1, 1, device="cuda")
        merge_attn_states(torch.empty_like(part), part, lse, part, lse)
        torch.cuda.synchronize()
        return merge_attn_states, "CUDA"
    except Exception:
        from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states

        return merge_attn_states, "Triton"
