"""Compile the kernels of triton_splitkv and composite on a machine without a GPU; one JSON line a request.

    python compile_kernels.py sm90

Run by test_compile.py in a process of its own, as the other tests have Triton interpret instead. Triton's driver is
replaced by one that names the target; launches become ``warmup`` calls, which compile and stop. For sm90, what is measured and tuned, all
kernels are compiled and assembled; for the others the split kernel alone, for what it takes of shared memory.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from flashmap.core import DeviceInfo, VerifyRequest
from flashmap.core.implementations.composite import kernels as composite_kernels
from flashmap.core.implementations.composite import launch as composite_launch
from flashmap.core.implementations.triton_splitkv import config, kernels, launch

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
ARCH = sys.argv[1] if len(sys.argv) > 1 else "sm90"
DEVICE = DeviceInfo.known(ARCH)
GQA = VerifyRequest(32, 8, 128, 128, num_requests=8, max_query_len=4, page_size=64)
MLA = VerifyRequest(16, 1, 576, 512, num_requests=8, max_query_len=4, page_size=64, latent=True)
EVERYTHING = dict(mask="packed", window=64, positions=True, kv_start=True, sinks=True, softcap=True, return_lse=True)
REQUESTS = {
    "gqa": GQA,
    "gqa 68 rows tree": replace(GQA, max_query_len=17, mask="qlen"),
    "gqa d256": replace(GQA, head_dim=256, v_head_dim=256, max_query_len=9, **EVERYTHING),
    "gqa fp8": replace(GQA, kv_dtype="fp8_e4m3", draft="dense", scales="device"),
    "gqa fp8 68 rows": replace(GQA, kv_dtype="fp8_e5m2", max_query_len=17, mask="qlen"),
    "gqa d80 fp8": replace(GQA, head_dim=80, v_head_dim=80, kv_dtype="fp8_e4m3"),
    "gqa d96 fp8": replace(GQA, head_dim=96, v_head_dim=96, kv_dtype="fp8_e4m3"),
    "gqa of any alignment": replace(GQA, head_dim=72, v_head_dim=72, kv_dtype="fp8_e4m3", scales="device", aligned=False),
    "mla": MLA,
    "mla tree": replace(MLA, max_query_len=17, mask="full", draft="dense"),
    "mla fp8": replace(MLA, kv_dtype="fp8_e4m3", scales="device", mask="qlen", max_query_len=17),
    "mla fp8 dense draft": replace(MLA, kv_dtype="fp8_e5m2", scales="host", draft="dense"),
}
# Row blocks of every size, and each way in which K, V and the draft tokens can share tiles.
ELSEWHERE = {
    "gqa": GQA,
    "gqa 68 rows": replace(GQA, max_query_len=17, mask="qlen"),
    "gqa d256": replace(GQA, head_dim=256, v_head_dim=256, max_query_len=17),
    "gqa fp8 68 rows": replace(GQA, kv_dtype="fp8_e5m2", max_query_len=17),
    "mla": MLA,
    "mla 16 rows": replace(MLA, heads=4),
    "mla 64 tokens": replace(MLA, max_query_len=64, mask="full", draft="dense"),
    "mla fp8": replace(MLA, kv_dtype="fp8_e5m2"),
    "mla fp8 dense draft": replace(MLA, kv_dtype="fp8_e5m2", draft="dense"),
    "mla fp32 with an fp8 cache": replace(MLA, heads=4, dtype="fp32", kv_dtype="fp8_e5m2"),
    "gqa d192 fp8 dense draft": replace(GQA, head_dim=192, max_query_len=17, kv_dtype="fp8_e5m2", draft="dense"),
    "mla fp8 32 rows dense draft": replace(MLA, heads=8, kv_dtype="fp8_e5m2", draft="dense"),
}
# For a composite implementation, whose library's result is made up.
TAILS = {
    "tail gqa tree": ("fa3_tail", replace(GQA, max_query_len=17, mask="qlen")),
    "tail gqa everything": ("fa3_tail", replace(GQA, head_dim=192, mask="full", kv_start=True, sinks=True, return_lse=True, draft="dense")),
    "tail mla tree": ("fa3_tail", replace(MLA, max_query_len=17, mask="packed")),
    "short mla": ("fa3", MLA),
    "tail flashmla": ("flashmla_tail", replace(MLA, heads=128, mask="qlen", draft="slots")),
}


class _Compiled:
    """Stands for a jitted kernel: ``kernel[grid](...)`` compiles and keeps the result."""

    def __init__(self, kernel):
        self.kernel, self.binary = kernel, None

    def __getitem__(self, grid):
        def compile_only(*args, **kwargs):
            self.binary = self.kernel.warmup(*args, grid=grid, **kwargs)

        return compile_only


def compile_request(request: VerifyRequest) -> dict:
    cpu = torch.device("cpu")
    call = launch.empty_call(request, cpu)
    plan = launch._plan(replace(call.request, max_kv_len=None), DEVICE)
    split, merge = _Compiled(launch._split_kernel(plan.config.kernel, request.aligned)), _Compiled(kernels.merge_kernel)
    originals = launch._split_kernel, kernels.merge_kernel
    launch._split_kernel, kernels.merge_kernel = (lambda name, aligned: split), merge
    try:
        launch._launch(call, plan, torch.empty(16))
    finally:
        launch._split_kernel, kernels.merge_kernel = originals
    return {
        "config": asdict(plan.config),
        "shared": split.binary.metadata.shared,
        "estimate": config.shared_memory(plan.config, request, DEVICE),
        "merges": merge.binary is not None,
        **(assemble(split.binary.asm["ptx"]) if ARCH == "sm90" else {}),
    }


def compile_tail(name: str, request: VerifyRequest) -> dict:
    """All kernels that the named implementation launches; what is reported is the tail's."""
    call = launch.empty_call(request, torch.device("cpu"))
    names = ("lengths_kernel", "pack_kernel", "tail_kernel")
    originals = {kernel: getattr(composite_kernels, kernel) for kernel in names}
    compiled = {kernel: _Compiled(original) for kernel, original in originals.items()}
    for kernel, stand_in in compiled.items():
        setattr(composite_kernels, kernel, stand_in)
    plan = composite_launch._plan(call.request, DEVICE, name)
    try:
        composite_launch._RUN[name](call, plan, torch.empty(plan.scratch), _library)
    finally:
        for kernel, original in originals.items():
            setattr(composite_kernels, kernel, original)
    tail = compiled["tail_kernel"].binary
    return {
        "launched": [kernel for kernel in names if compiled[kernel].binary],
        "shared": tail.metadata.shared,
        **assemble(tail.asm["ptx"]),
    }


def _library(q: torch.Tensor, head_size_v: int = 0, out: torch.Tensor | None = None, **others: object) -> tuple[torch.Tensor, torch.Tensor]:
    if head_size_v:
        return q[..., :head_size_v].contiguous(), torch.empty(q.shape[0], q.shape[2], q.shape[1])
    return out, torch.empty(q.shape[1], q.shape[0])


def assemble(ptx: str) -> dict:
    """What ptxas says: registers, bytes of spills, and whether it serialised the warpgroup products (C7510 to C7519)."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [PTXAS, "-v", "--gpu-name", "sm_90a", source, "-o", Path(folder, "kernel.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", said).group(1)),
        "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill", said)),
        "serialised": re.findall(r"C75\d\d", said),
    }


if __name__ == "__main__":
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", int(ARCH.removeprefix("sm")), 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=0: 0,
            get_device_interface=lambda: torch.cuda,
            get_active_torch_device=lambda: torch.device("cpu"),
            is_active=lambda: True,
            utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": DEVICE.shared_memory}),
        )
    )
    for name, request in (REQUESTS if ARCH == "sm90" else ELSEWHERE).items():
        print(json.dumps({"name": name, **compile_request(request)}), flush=True)
    for name, (implementation, request) in (TAILS if ARCH == "sm90" else {}).items():
        print(json.dumps({"name": name, **compile_tail(implementation, request)}), flush=True)
