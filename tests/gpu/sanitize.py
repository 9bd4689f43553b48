"""A small set of calls for NVIDIA's compute-sanitizer, which finds what a right result can hide.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py fa3_tail     (what it declines is said)
    FLASHMAP_SPLITKV_LAST_MERGES=1 compute-sanitizer ...

Torch's caching allocator would hide a read past a tensor, so it is off here.
"""

from __future__ import annotations

import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from flashmap.core import Declined
from flashmap.core.testing import Case, assert_conforms

KERNEL = "triton_splitkv"
GQA = {"heads": 8, "kv_heads": 2, "head_dim": 128}
MLA = {"heads": 16, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "latent": True}
RAGGED = {"query_lens": (5, 0, 8, 1), "prefix_lens": (300, 40, 65, 0), "dtype": "bf16"}
CASES = [
    Case("gqa chain", **GQA, **RAGGED, page_size=64, lse=True),
    Case("gqa slots full tree", **GQA, **RAGGED, layout="slots", mask="full", draft="dense"),
    Case("gqa window tree", **GQA, **RAGGED, mask="packed", window=50, positions=True, kv_start=True, sinks=True, softcap=8.0),
    Case("gqa fp8", **GQA, **RAGGED, kv_dtype="fp8_e4m3", scales="device", mask="qlen", page_size=16),
    Case("gqa wide", heads=8, kv_heads=1, head_dim=128, dtype="fp16", query_lens=(40,), prefix_lens=(500,), page_size=64),
    Case("mla chain", **MLA, **RAGGED, page_size=64, lse=True),
    Case("mla slots tree", **MLA, **RAGGED, layout="slots", mask="packed", draft="slots", sinks=True),
    Case("mla dense tree", **MLA, **RAGGED, page_size=1, mask="qlen", draft="dense"),
    Case("mla fp8", **MLA, **RAGGED, kv_dtype="fp8_e5m2", scales="host", page_size=64),
    Case("fp32", **GQA, query_lens=(4, 3), prefix_lens=(70, 9), dtype="fp32"),
]

if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    name = sys.argv[1] if len(sys.argv) > 1 else KERNEL
    for case in CASES:
        try:
            assert_conforms(name, case, "cuda")
            print(f"{case.name}: ok", flush=True)
        except Declined as declined:
            if name == KERNEL:
                raise
            print(f"{case.name}: {declined}", flush=True)
