"""Add an implementation: torch's own attention kernel, request by request, registered and run through the conformance kit.

    python examples/02_add_an_implementation.py

It serves chains over a paged cache that holds the draft, and says so; everything else it declines with a reason.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from flashmap.core import Capability, Implementation
from flashmap.core.inputs import Call
from flashmap.core.registry import register
from flashmap.core.testing import check


class TorchSDPA(Implementation):
    """One call of scaled_dot_product_attention for each request. It reads lengths on the host: not for graph capture."""

    def run(self, call: Call) -> None:
        starts, lengths = call.cu_seqlens_q.tolist(), call.kv.kv_lens.tolist()
        for r, (first, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            rows, length = end - first, min(lengths[r], call.kv.max_kv_len)
            if rows == 0 or length == 0:
                call.out[first:end] = 0  # a row that sees nothing gives 0
                continue
            listed = torch.arange(length, device=call.q.device)
            page, row = call.kv.block_table[r, listed // call.kv.page_size].long(), listed % call.kv.page_size
            k, v = (cache[page, row].transpose(0, 1) for cache in (call.kv.k, call.kv.v))  # [Hkv, length, D]
            prefix = max(length - rows, 0)
            sees = listed <= prefix + torch.arange(rows, device=call.q.device)[:, None]  # a chain
            q = call.q[first:end].transpose(0, 1)
            out = scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=call.scale, enable_gqa=True)
            call.out[first:end] = out.transpose(0, 1)


IMPLEMENTATION = TorchSDPA("torch_sdpa", Capability(kv_dtypes=frozenset({"fp32", "fp16", "bf16"}), features=frozenset()))


def main() -> None:
    register(IMPLEMENTATION)
    results = check("torch_sdpa", "cuda" if torch.cuda.is_available() else "cpu", dtypes=("fp32",))
    for outcome in ("ok", "declined", "failed"):
        print(f"{outcome}: {sum(result.outcome == outcome for result in results)}")
    for result in results:
        if result.outcome == "failed":
            print(result)
    declined = next(result for result in results if result.outcome == "declined")
    print(f"a case it does not serve: {declined.case}: {'; '.join(declined.reasons)}")


if __name__ == "__main__":
    main()
