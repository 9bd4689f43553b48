"""Call the op: two requests with long prefixes in a paged cache, a chain of draft tokens and then a tree. CPU or GPU.

python examples/01_call_it.py
"""

from __future__ import annotations

import torch

from flashmap.core import DeviceInfo, PagedKV, TreeMask, VerifyRequest, verify_attention
from flashmap.core.dispatch import Policy, choose

HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 2, 64, 16
PREFIX = (300, 1000)  # cached keys of each request
L = 5  # query tokens of each: the root and four drafts


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    # The engine's cache: pages of 16 tokens, of which each request owns some, in any order.
    lengths = [prefix + L for prefix in PREFIX]  # the draft tokens are in the cache already, behind the prefix
    pages = [-(-length // PAGE) for length in lengths]
    free = torch.randperm(sum(pages) + 10, device=device).int()
    block_table = torch.zeros(len(PREFIX), max(pages), dtype=torch.int32, device=device)
    for r, count in enumerate(pages):
        block_table[r, :count], free = free[:count], free[count:]
    k, v = torch.randn(2, sum(pages) + 10, PAGE, KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    kv = PagedKV(k, v, block_table, kv_lens=torch.tensor(lengths, device=device))

    # The queries of all requests, request by request.
    q = torch.randn(len(PREFIX) * L, HEADS, HEAD_DIM, dtype=dtype, device=device)
    cu_seqlens_q = torch.arange(len(PREFIX) + 1, device=device) * L

    # A tree: the root 0 has the children 1 and 2; 3 is a child of 1, and 4 of 2. Row t sees itself and its ancestors.
    parent = [-1, 0, 0, 1, 2]
    sees = torch.eye(L, dtype=torch.bool, device=device)
    for t in range(1, L):
        sees[t] |= sees[parent[t]]
    tree = TreeMask(sees.expand(len(PREFIX), L, L).contiguous(), "qlen")

    for title, mask in (("chain", None), ("tree", tree)):
        arguments = {"cu_seqlens_q": cu_seqlens_q, "max_query_len": L, "mask": mask}
        out = verify_attention(q, kv, **arguments)
        expected = verify_attention(q, kv, **arguments, impl="reference")
        chosen = choose(VerifyRequest.of(q, kv, **arguments), DeviceInfo.of(device), Policy()).winner
        error = (out.float() - expected.float()).abs().max().item()
        print(f"{title}: out {tuple(out.shape)} on {device.type} by {chosen}, largest difference from the reference {error:.1e}")


if __name__ == "__main__":
    main()
