#!/usr/bin/env python3
"""Pack the peers of `flashmap bench` into one folder for a GPU host that reaches no package index.

    python benchmarks/pack_peers.py --out peers-pack [--seed-diff FILE]
    (on the host)  eval "$(bash peers-pack/unpack.sh /tmp/peers)" && flashmap bench --peers-check

The folder holds the kernels alone: of vLLM and sglang only the modules around them, above small stand-ins for the
engines' platform and logging modules, so that importing one takes no engine. In vLLM's libraries (`_C_stable_libtorch` is
wanted for `merge_attn_states` alone) everything but sm_90 machine code is zeroed, which makes that one a sixth as large.
--seed-diff names a diff whose added lines become `seed_splitkv.py`, a peer that has no package; --aot a folder of
compile_flashinfer.py. Never import the result as an engine.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEELS = ["vllm==0.26.0", "sglang==0.5.23", "flashinfer-python==0.6.14", "apache-tvm-ffi==0.1.10"]
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in range(39, 4, -1)] + ["manylinux2014_x86_64", "any"]
KEPT_ARCH = 90  # Hopper

VLLM_FILES = [
    "vllm/vllm_flash_attn/__init__.py",
    "vllm/vllm_flash_attn/flash_attn_interface.py",
    "vllm/third_party/flashmla/__init__.py",
    "vllm/third_party/flashmla/flash_mla_interface.py",
    "vllm/v1/attention/ops/flashmla.py",
    "vllm/v1/attention/ops/merge_attn_states.py",
    "vllm/v1/attention/ops/triton_merge_attn_states.py",
    "vllm/v1/attention/ops/triton_unified_attention.py",
    "vllm/v1/attention/ops/triton_attention_helpers.py",
]
VLLM_LIBS = [
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "vllm/_flashmla_C.abi3.so",
    "vllm/_flashmla_extension_C.abi3.so",
    "vllm/_C_stable_libtorch.abi3.so",
]
SGLANG_OPS = ["extend_attention", "decode_attention", "score_mod", "merge_state", "verify_splitkv", "verify_mla"]

STAND_INS = {
    "vllm/__init__.py": '"""The kernels of vLLM 0.26.0 alone; see flashmap benchmarks/pack_peers.py."""\n__version__ = "0.26.0"\n',
    "vllm/envs.py": "VLLM_BATCH_INVARIANT = False\n",
    "vllm/logger.py": """import logging

def init_logger(name):
    logger = logging.getLogger(name)
    for level in ("debug", "info", "warning"):
        setattr(logger, level + "_once", getattr(logger, level))
    return logger
""",
    "vllm/platforms/__init__.py": """import torch

class _Cuda:
    def is_cuda(self): return True
    def is_cuda_alike(self): return True
    def is_rocm(self): return False
    def is_xpu(self): return False
    def is_cpu(self): return False
    def fp8_dtype(self): return torch.float8_e4m3fn
    def has_device_capability(self, n):
        major, minor = torch.cuda.get_device_capability()
        return major * 10 + minor >= n
    def is_device_capability_family(self, n):
        return torch.cuda.get_device_capability()[0] == n // 10

current_platform = _Cuda()
""",
    "vllm/triton_utils/__init__.py": "import triton\nimport triton.language as tl\nHAS_TRITON = True\n",
    "vllm/_custom_ops.py": """import torch
import vllm._C_stable_libtorch  # noqa: F401  registers torch.ops._C

def merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None,
                      prefill_tokens_with_context=None, output_scale=None):
    torch.ops._C.merge_attn_states(output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse,
                                   prefill_tokens_with_context, output_scale)
""",
    "sglang/__init__.py": '"""Kernels of sglang 0.5.23 alone; see flashmap benchmarks/pack_peers.py."""\n__version__ = "0.5.23"\n',
    "sglang/srt/environ.py": """class _Unset:
    def get(self): return None

class _Envs:
    def __getattr__(self, name): return _Unset()

envs = _Envs()
""",
    "sglang/srt/utils.py": """import torch

def is_cuda(): return torch.cuda.is_available()
def is_hip(): return False
def is_gfx95_supported(): return False
def is_gfx1250_supported(): return False
def get_device_core_count(device_id=0): return torch.cuda.get_device_properties(device_id).multi_processor_count
""",
}

UNPACK = r"""#!/usr/bin/env bash
# bash unpack.sh TARGET: checks, extracts there unless that was done, and prints the export lines on stdout (so: eval "$(bash unpack.sh TARGET)").
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
site=${1:?usage: unpack.sh TARGET}
mkdir -p "$site"
site=$(cd "$site" && pwd)
if ! cmp -s "$here/SHA256SUMS" "$site/SHA256SUMS"; then
    start=$SECONDS
    (cd "$here" && sha256sum --quiet --strict -c SHA256SUMS) >&2
    xz -dc "$here/site.tar.xz" | tar -x --no-same-owner -C "$site" -f -
    jobs=()
    while read -r file path; do
        mkdir -p "$(dirname "$site/$path")"
        xz -dc "$here/$file" >"$site/$path" &
        jobs+=($!)
    done <"$here/libs.txt"
    for job in "${jobs[@]}"; do wait "$job"; done
    cp "$here/SHA256SUMS" "$site/SHA256SUMS"
    echo "peers unpacked into $site in $((SECONDS - start)) s" >&2
fi
echo "export FLASHMAP_PEERS=$site"
"""


def download(folder: Path) -> dict:
    """The wheels, {distribution name: path}; those already in the folder are not fetched again."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for spec in WHEELS:
        name, version = spec.split("==")
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        if not list(folder.glob(pattern)):
            tags = [flag for p in PLATFORMS for flag in ("--platform", p)]
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
            command += ["--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none"]
            subprocess.run(command + tags + [spec], check=True)
        found[name] = next(folder.glob(pattern))
    return found


def zero_other_gpus(path: Path) -> None:
    """Zero what a library's fat binaries hold beside machine code for KEPT_ARCH. Kernels made for others alone then fail to load."""
    data = bytearray(path.read_bytes())
    sections = subprocess.run(["readelf", "-SW", str(path)], capture_output=True, text=True, check=True).stdout
    match = re.search(r"\.nv_fatbin\s+PROGBITS\s+\S+\s+(\S+)\s+(\S+)", sections)
    at, end = int(match[1], 16), int(match[1], 16) + int(match[2], 16)
    while at < end - 16:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != 0xBA55ED50:
            at += 8
            continue
        entry = at + header
        while entry < at + header + size:  # kind 2 is machine code (1 is PTX); the architecture is the u32 at 0x1c
            kind, _, skip, length = struct.unpack_from("<HHIQ", data, entry)
            arch = struct.unpack_from("<I", data, entry + 0x1C)[0]
            if (kind, arch) != (2, KEPT_ARCH):
                data[entry + skip : entry + skip + length] = bytes(length)
            entry += skip + length
        at += header + size
    path.write_bytes(data)


def class_source(text: str, name: str) -> str:
    """The source of one top-level class of a module."""
    node = next(n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == name)
    return ast.get_source_segment(text, node)


def write_site(site: Path, wheels: dict, seed_diff: Path | None, aot: Path | None) -> None:
    """Fill the folder that goes onto the peers' import path, libraries included."""
    with zipfile.ZipFile(wheels["vllm"]) as wheel:
        wheel.extractall(site, VLLM_FILES + VLLM_LIBS)
        modes = class_source(wheel.read("vllm/v1/kv_cache_interface.py").decode(), "KVQuantMode")
    with zipfile.ZipFile(wheels["sglang"]) as wheel:
        wheel.extractall(site, [f"sglang/kernels/ops/attention/{name}.py" for name in SGLANG_OPS])
    for name in ("flashinfer-python", "apache-tvm-ffi"):
        with zipfile.ZipFile(wheels[name]) as wheel:
            wheel.extractall(site)
    texts = dict(STAND_INS, **{"vllm/v1/kv_cache_interface.py": "from enum import IntEnum\n\n\n" + modes + "\n"})
    for path, text in texts.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    for package in ("vllm", "sglang"):
        for folder in [p for p in (site / package).rglob("*") if p.is_dir()]:
            (folder / "__init__.py").touch()
    if aot:
        shutil.copytree(aot, site / "flashinfer/data/aot")
    if seed_diff:
        lines = seed_diff.read_text().splitlines()
        body = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
        (site / "seed_splitkv.py").write_text("\n".join(body) + "\n")


def main() -> None:
    """Download, trim, compress, write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("peers-pack"))
    parser.add_argument("--wheels", type=Path, default=Path.home() / ".cache/flashmap-peers", help="where downloads are kept")
    parser.add_argument("--seed-diff", type=Path, help="a diff whose added lines are the seed kernel's module")
    parser.add_argument("--aot", type=Path, help="FlashInfer's compiled kernels, from compile_flashinfer.py")
    args = parser.parse_args()
    wheels = download(args.wheels)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        site = Path(work)
        write_site(site, wheels, args.seed_diff, args.aot)
        listing = []
        for number, path in enumerate(VLLM_LIBS):
            subprocess.run(["strip", "-s", str(site / path)], check=True)
            zero_other_gpus(site / path)
            with open(args.out / f"lib{number}.xz", "wb") as out:
                subprocess.run(["xz", "-6", "-T1", "-c", str(site / path)], stdout=out, check=True)
            (site / path).unlink()
            listing.append(f"lib{number}.xz {path}\n")
        (args.out / "libs.txt").write_text("".join(listing))
        with tarfile.open(args.out / "site.tar.xz", "w:xz", preset=6) as tar:
            for path in sorted(site.iterdir()):
                tar.add(path, path.name)
    (args.out / "unpack.sh").write_text(UNPACK)
    names = sorted(p.name for p in args.out.iterdir() if p.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256((args.out / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (args.out / "SHA256SUMS").write_text("".join(sums))
    total = sum(p.stat().st_size for p in args.out.iterdir())
    print(f"{args.out}: {total / 1e6:.1f} MB ({shutil.disk_usage(args.out).free / 1e9:.0f} GB free)")


if __name__ == "__main__":
    main()
