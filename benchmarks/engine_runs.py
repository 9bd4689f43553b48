"""The runs behind docs/engines.md: many engines on one GPU, each a process of engine_bench.py, loaded at once and measured one by one.

    python -m benchmarks.engine_runs sglang text --out DIR
    python -m benchmarks.engine_runs vllm steps --out DIR --only "llama-.*"
    python -m benchmarks.engine_runs sglang text acceptance soak --list

DIR gets one JSON line a run, in ENGINE-WHAT.jsonl, and a log of each. One engine does all that is asked for and named alike.
``--at-once`` says how many fit on the GPU; engines of ``steps`` hold weights of a full-sized model, 17 GB for Llama's and 4 GB for DeepSeek's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine_bench import MEASURES
from benchmarks.models.architecture import DeepSeek, Llama
from benchmarks.models.checkpoints import DEEPSEEK, EAGLE, EAGLE3, HERE, LLAMA

# Shapes whose weights are made up: Llama-3.1-8B's, and DeepSeek-V3's attention with 16 heads in a narrow dense model.
_LONG = {"max_position_embeddings": 131072}
_LLAMA = Llama(4096, 14336, 32, 32, 8, 128).config() | _LONG | {"vocab_size": 128256, "rope_theta": 500000.0}
_DEEPSEEK = DeepSeek(2048, 4096, 16, 16, 1536, moe_intermediate_size=512).config() | _LONG | {"vocab_size": 32000}
_DEEPSEEK.pop("rope_scaling")
SHAPES = {
    "llama8b": _LLAMA,
    "eagle8b": _LLAMA | {"num_hidden_layers": 1},
    "eagle8b_sglang": _LLAMA | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle"]},
    "dsv3": _DEEPSEEK,
}
_NO_DRAFTS = {"FLASHMAP_SGLANG_MODES": "target_verify,draft_extend_v2"}
_CTX = ["--ctx", "8192,32768"]
_BIG = {"llama": ["--model", "llama8b", "--steps"], "dsv3": ["--model", "dsv3", "--steps", "3"]}


@dataclass(frozen=True, slots=True)
class Run:
    """One engine: ``arguments`` of engine_bench.py, in which models are names of SHAPES or of the small models, and what it measures."""

    name: str
    arguments: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    whats: list[str] = field(default_factory=list)


def runs(engine: str, whats: list[str]) -> list[Run]:
    """All runs of these kinds, in the order in which they are measured."""
    found: dict[str, Run] = {}
    for what in whats:
        for run in {"sglang": _sglang, "vllm": _vllm}[engine](what):
            found.setdefault(run.name, run).whats.append(what)
    return list(found.values())


def _sglang(what: str) -> Iterator[Run]:
    ds, ll = ["--model", DEEPSEEK, "--steps", "3"], ["--model", LLAMA, "--draft", f"{EAGLE}_sglang", "--steps", "5"]
    tree = ["--topk", "4"]
    small = [("ds-tree", ds + tree), ("ll-tree", ll + tree)]
    if what == "text":
        for name, arguments in (*small, ("ds-chain", ds), ("ll-chain", ll)):
            forced = "forced" if name.endswith("chain") else "auto"
            yield from _grid(name, arguments, ("triton", "fa3"), ("off", forced, "check"))
        e3 = ["--model", LLAMA, "--draft", EAGLE3, "--steps", "5", *tree]
        yield from _grid("ll-e3tree", e3, ("triton",), ("off", "auto"))
        paged = ["--page-size", "64"]
        yield from _grid("ds-p64", ds + tree + paged, ("fa3",), ("auto",))  # without FlashMap it ends with an illegal memory access
        yield from _grid("ll-p64", ll + tree + paged, ("fa3",), ("off", "auto"))
        for name, arguments in small:
            yield from _grid(f"{name}-qlen", arguments, ("triton",), ("auto",), {"FLASHMAP_SGLANG_QLEN_MASK": "1"})
    elif what in ("acceptance", "soak"):
        for name, arguments in small:
            yield from _grid(name, arguments, ("triton", "fa3"), ("off", "auto") if what == "acceptance" else ("auto",))
    else:
        llama = [*_BIG["llama"], "5", "--draft", "eagle8b_sglang"]
        for kind, more in (("tree", tree), ("chain", [])):
            for name, arguments in (("llama", llama), ("dsv3", _BIG["dsv3"])):
                yield from _grid(f"{name}-{kind}", [*arguments, *more, *_CTX], ("triton", "fa3"), ("off", "auto"))
            yield from _grid(f"llama-{kind}-nodrafts", [*llama, *more, *_CTX], ("triton",), ("auto",), _NO_DRAFTS)
        yield from _grid("dsv3-tree", [*_BIG["dsv3"], *tree, *_CTX], ("fa3",), ("forced", "fa3_tail"))


def _vllm(what: str) -> Iterator[Run]:
    ds, ll = ["--model", DEEPSEEK, "--steps", "3"], ["--model", LLAMA, "--draft", EAGLE, "--steps", "5"]
    dense, latent = ("TRITON_ATTN", "FLASH_ATTN"), ("TRITON_MLA", "FLASH_ATTN_MLA", "FLASHMLA")
    if what == "text":
        yield from _grid("ll", ll, dense, ("off", "auto", "forced", "check"))
        yield from _grid("ds", ds, latent, ("off", "auto", "forced", "check"))
        ngram = ["--model", LLAMA, "--method", "ngram", "--steps", "4"]
        yield from _grid("ll-ngram", ngram, dense, ("off", "forced"))
        eager32 = ["--engine-args", json.dumps({"dtype": "float32", "enforce_eager": True})]
        yield from _grid("ll-f32", ll + eager32, ("TRITON_ATTN",), ("off", "forced"))
        chunked = ["--engine-args", json.dumps({"max_num_batched_tokens": 256})]
        yield from _grid("ll-chunked", ll + chunked, dense, ("forced",))
        yield from _grid("ds-chunked", ds + chunked, ("TRITON_MLA",), ("forced",))
        yield from _grid("ll-fp8", [*ll, "--engine-args", json.dumps({"kv_cache_dtype": "fp8"})], ("TRITON_ATTN",), ("off", "check"))
        yield from _grid("ll-plain", ["--model", LLAMA, "--method", "none"], ("TRITON_ATTN",), ("off",))
        yield from _grid("ds-plain", ["--model", DEEPSEEK, "--method", "none"], ("TRITON_MLA",), ("off",))
        for name, arguments, backend in (("ll", ll, "TRITON_ATTN"), ("ds", ds, "TRITON_MLA")):
            for runner in "01":
                yield from _grid(f"{name}-v2is{runner}", arguments, (backend,), ("forced",), {"VLLM_USE_V2_MODEL_RUNNER": runner})
    elif what in ("acceptance", "soak"):
        yield from _grid("ll", ll, dense, ("off", "auto") if what == "acceptance" else ("auto",))
        yield from _grid("ds", ds, latent[:2], ("off", "auto"))
    else:
        yield from _grid("llama", [*_BIG["llama"], "7", "--draft", "eagle8b", *_CTX], dense, ("off", "auto"))
        yield from _grid("dsv3", [*_BIG["dsv3"], *_CTX], latent[:2], ("off", "auto"))


def _grid(
    name: str, arguments: list[str], backends: tuple[str, ...], flashmap: tuple[str, ...], environ: dict[str, str] | None = None
) -> Iterator[Run]:
    for backend in backends:
        for mode in flashmap:
            yield Run(f"{name}-{backend}-{mode}", [*arguments, "--backend", backend, "--flashmap", mode], environ or {})


# -- running ------------------------------------------------------------------------------------------------------------


def main() -> None:
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("sglang", "vllm"))
    parser.add_argument("what", nargs="+", choices=tuple(MEASURES))
    parser.add_argument("--out", type=Path, help="a folder")
    parser.add_argument("--only", default="", help="a regular expression that the names begin with")
    parser.add_argument("--at-once", type=int, default=8, help="engines on the GPU at a time")
    parser.add_argument("--load-seconds", type=float, default=300, help="an engine that is not loaded then is left behind")
    parser.add_argument("--measure-seconds", type=float, default=300, help="for all the engines that are on the GPU at a time")
    parser.add_argument("--profile", action="store_true", help="steps: also a trace of each, in DIR/NAME")
    parser.add_argument("--list", action="store_true", help="the names and their arguments")
    args = parser.parse_args()
    chosen = [run for run in runs(args.engine, args.what) if re.match(args.only, run.name)]
    if args.list:
        for run in chosen:
            print(run.name, *(f"{k}={v}" for k, v in run.environ.items()), *run.arguments)
        return
    if args.profile and args.what != ["steps"]:
        parser.error("--profile goes with steps")
    if args.out is None or not chosen:
        parser.error("--out: give a folder" if chosen else f"--only {args.only!r} matches no run: see --list")
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for start in range(0, len(chosen), args.at_once):
        failed += _wave(args, chosen[start : start + args.at_once])
    if failed:
        sys.exit(f"{len(failed)} of {len(chosen)} runs failed: {', '.join(failed)}; their logs are in {args.out}")


def _wave(args: argparse.Namespace, wave: list[Run]) -> list[str]:
    """The names of those that did not end well."""
    with tempfile.TemporaryDirectory() as folder:
        turn = Path(folder) / "turn"
        processes = {run.name: _start(args, run, Path(folder), turn) for run in wave}
        try:
            end = time.monotonic() + args.load_seconds
            while len(_ready(turn)) + _ended(processes) < len(wave) and time.monotonic() < end:
                time.sleep(0.5)
            print(f"{len(_ready(turn))} of {len(wave)} engines are loaded", flush=True)
            ready = _ready(turn)
            _kill(process for process in processes.values() if process.pid not in ready)
            turn.touch()
            end = time.monotonic() + args.measure_seconds
            while _ended(processes) < len(wave) and time.monotonic() < end:
                time.sleep(0.5)
        finally:
            _kill(processes.values())
    failed = [name for name, process in processes.items() if process.wait() != 0]
    for name in processes:
        print(f"{name:32} {'failed' if name in failed else 'ok'}", flush=True)
    return failed


def _start(args: argparse.Namespace, run: Run, folder: Path, turn: Path) -> subprocess.Popen[bytes]:
    words = run.arguments
    arguments = [_model(word, folder) if words[i - 1] in ("--model", "--draft") else word for i, word in enumerate(words)]
    command = [
        sys.executable, "-m", "benchmarks.engine_bench", args.engine, *run.whats, *arguments,
        "--name", run.name, "--turn", str(turn), "--json-out", str(args.out / f"{args.engine}-WHAT.jsonl"),
        *(["--profile", str(args.out / run.name)] if args.profile else []),
    ]  # fmt: skip
    with open(args.out / f"{run.name}.log", "w") as log:
        return subprocess.Popen(command, env=os.environ | run.environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def _model(name: str, folder: Path) -> str:
    """The folder of a small model, or a new one with the config of a shape."""
    if name not in SHAPES:
        return str(HERE / name)
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(SHAPES[name]))
    return str(folder / name)


def _ready(turn: Path) -> set[int]:
    """Processes whose engine is loaded."""
    ready = Path(f"{turn}.ready")
    return set(map(int, ready.read_text().split())) if ready.exists() else set()


def _kill(processes: Iterable[subprocess.Popen[Any]]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # an engine's own processes too


def _ended(processes: dict[str, subprocess.Popen[Any]]) -> int:
    return sum(process.poll() is not None for process in processes.values())


if __name__ == "__main__":
    main()
