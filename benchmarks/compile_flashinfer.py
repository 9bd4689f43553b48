#!/usr/bin/env python3
"""Compile FlashInfer's kernels for `flashmap bench` here, without a GPU, so that a GPU host need not (minutes a machine).

    PYTHONPATH=<flashinfer and apache-tvm-ffi> python benchmarks/compile_flashinfer.py --out DIR    (then pack_peers.py --aot DIR)

It needs the host's CUDA version of nvcc, a C++ compiler, ninja, and torch of any kind. DIR gets one folder a kernel,
as FlashInfer's `data/aot` has them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


def main() -> None:
    """Compile the three modules that the peer uses: paged prefill, its mask packing, MLA."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache/flashmap-flashinfer", help="where objects are kept")
    args = parser.parse_args()
    if Path("/usr/local/cuda/bin/nvcc").is_file():  # else FlashInfer takes the folder of whatever `nvcc` is first on PATH
        os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    os.environ.update(FLASHINFER_CUDA_ARCH_LIST="9.0a", FLASHINFER_WORKSPACE_BASE=str(args.work), MAX_JOBS=str(args.jobs))
    with tempfile.TemporaryDirectory() as stubs:
        # the linker wants a libcuda, which only a driver brings: an empty one of that name does
        source = Path(stubs, "empty.c")
        source.write_text("void flashmap_empty(void) {}\n")
        subprocess.run(["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", f"{stubs}/libcuda.so", str(source)], check=True)
        os.environ["LIBRARY_PATH"] = stubs
        for spec in _specs():
            print(f"compiling {spec.name}", flush=True)
            spec.build(verbose=False)
            folder = args.out / spec.name
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(spec.jit_library_path, folder / f"{spec.name}.so")


def _specs() -> list:
    import torch
    from flashinfer.jit.attention import gen_batch_mla_module, gen_batch_prefill_module
    from flashinfer.jit.quantization import gen_quantization_module

    bf16 = torch.bfloat16
    return [
        gen_batch_prefill_module("fa2", bf16, bf16, bf16, torch.int32, 128, 128, 0, False, False, False),
        gen_quantization_module(),
        gen_batch_mla_module("fa3", bf16, bf16, bf16, torch.int32, 512, 64, False),
    ]


if __name__ == "__main__":
    main()
