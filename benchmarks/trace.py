"""One verify step of SGLang in a torch profiler trace: what the GPU does in it, as numbers and as a picture.

    python -m benchmarks.trace slim TRACE.json.gz OUT.json.gz              # keeps the GPU's events and the host's launches
    python -m benchmarks.trace plot WITHOUT.json.gz WITH.json.gz --out step.svg

``engine_bench.py sglang steps --profile DIR`` writes the traces. A step is what lies between two runs of the kernel that builds the
draft tree, by the GPU's clock; the one in the middle of the trace is taken.
"""

from __future__ import annotations

import argparse
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STEP = "build_tree_efficient"
_HOST = ("cudaGraphLaunch", "cudaLaunchKernel", "cudaLaunchKernelExC", "cudaEventSynchronize", "cudaStreamSynchronize")
# (part, colour, beginnings of kernels' names). A draft's own attention decodes, or reads a window; the target's verifies.
PARTS = (
    ("verify attention", "#d1495b", ("split_kernel", "latent_kernel", "merge_kernel", "_fwd_kernel", "extend", "void cutlass::device_kernel<flash")),
    ("draft's attention", "#edae49", ("_fwd_grouped_kernel", "_fwd_kernel_stage")),
    ("matrix products", "#30638e", ("nvjet", "void cublasLt", "void cutlass", "sm90_xmma")),
    ("everything else", "#9aa5b1", ("",)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """``kernels`` and ``host``: (part or call, start, duration) in milliseconds from the step's begin."""

    length: float
    kernels: list[tuple[str, float, float]]
    host: list[tuple[str, float, float]]

    def share(self, part: str) -> float:
        """Milliseconds of the GPU."""
        return sum(duration for name, _, duration in self.kernels if name == part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    slim = commands.add_parser("slim")
    slim.add_argument("trace", type=Path)
    slim.add_argument("out", type=Path)
    plot = commands.add_parser("plot")
    plot.add_argument("without", type=Path)
    plot.add_argument("with_", metavar="with", type=Path)
    plot.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "slim":
        args.out.write_bytes(gzip.compress(json.dumps(events(args.trace)).encode()))
        return
    steps = {"without FlashMap": middle_step(args.without), "with FlashMap": middle_step(args.with_)}
    for name, step in steps.items():
        parts = ", ".join(f"{part} {step.share(part):.2f}" for part, _, _ in PARTS)
        print(f"{name}: {step.length:.2f} ms a step; on the GPU: {parts}")
    _plot(steps, args.out)


def events(path: Path) -> list[dict[str, Any]]:
    """{n: name, c: category, t: start, d: duration (both µs), s: stream or thread} of the GPU's events and of the host's launches."""
    found = json.loads(gzip.decompress(path.read_bytes()))
    if isinstance(found, list):
        return found
    return [
        {"n": e["name"][:90], "c": e["cat"], "t": round(e["ts"], 1), "d": round(e.get("dur", 0), 1), "s": e.get("tid")}
        for e in found["traceEvents"]
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") or (e.get("cat") == "cuda_runtime" and e["name"] in _HOST)
    ]


def middle_step(path: Path) -> Step:
    """Raises ValueError where the trace holds fewer than three steps."""
    found = sorted(events(path), key=lambda event: event["t"])
    begins = [event["t"] for event in found if event["n"].startswith(_STEP)]
    if len(begins) < 4:
        raise ValueError(f"{path}: {len(begins)} runs of {_STEP}; profile at least 4 steps")
    begin, end = begins[len(begins) // 2 - 1 : len(begins) // 2 + 1]
    inside = [(event, (event["t"] - begin) / 1e3, event["d"] / 1e3) for event in found if begin <= event["t"] < end]
    return Step(
        (end - begin) / 1e3,
        [(_part(event["n"]), start, duration) for event, start, duration in inside if event["c"] != "cuda_runtime"],
        [(event["n"], start, duration) for event, start, duration in inside if event["c"] == "cuda_runtime"],
    )


def _part(kernel: str) -> str:
    # _fwd_kernel_stage2 begins with _fwd_kernel: the longer beginning decides.
    found = max(((len(start), part) for part, _, starts in PARTS for start in starts if kernel.startswith(start)), key=lambda f: f[0])
    return found[1]


def _plot(steps: dict[str, Step], out: Path) -> None:
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(9, 2.6))
    for row, step in enumerate(steps.values()):
        for part, colour, _ in PARTS:
            bars = [(start, duration) for name, start, duration in step.kernels if name == part]
            axes.broken_barh(bars, (2.2 * row, 0.9), facecolors=colour, linewidth=0, rasterized=True)
        waits = [(start, duration) for name, start, duration in step.host if name.endswith("Synchronize")]
        launches = [(start, duration) for name, start, duration in step.host if not name.endswith("Synchronize")]
        axes.broken_barh(waits, (2.2 * row + 1.0, 0.45), facecolors="#dfe3e8", linewidth=0, rasterized=True)
        axes.broken_barh(launches, (2.2 * row + 1.0, 0.45), facecolors="#555555", linewidth=0, rasterized=True)
    axes.set_yticks([tick for row in range(len(steps)) for tick in (2.2 * row + 0.45, 2.2 * row + 1.22)])
    axes.set_yticklabels([label for name in steps for label in (f"{name}: GPU", "host")])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of one step")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    patches = [Patch(color=colour, label=part) for part, colour, _ in PARTS]
    patches += [Patch(color="#555555", label="host launches"), Patch(color="#dfe3e8", label="host waits")]
    figure.legend(handles=patches, ncols=6, loc="upper center", frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(out, dpi=200)  # thousands of bars: they are drawn as one picture


if __name__ == "__main__":
    main()
