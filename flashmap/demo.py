"""``flashmap demo``: a real engine with the plugin, and without it; then the op by itself. Needs no GPU.

The first half serves the same prompts three times with vLLM's CPU engine, by a small trained DeepSeek-V3-shaped model with a
multi-token-prediction layer (benchmarks/models of a checkout): without speculation, with speculation on vLLM's own kernels, and
with speculation on FlashMap, which vLLM loads by itself through its plugin entry point. The second half times every
implementation of the op.

Each engine is a process of its own (``python -m flashmap.demo PLAN RESULT``), configured by environment variables that
this file spells out. Nothing is kept afterwards.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json as jsonlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from flashmap.core.inputs import PagedKV, TreeMask

# What vLLM needs for a small engine on any machine, besides its defaults.
_ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads wait for each other where other programs run
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_DRAFT_TOKENS = 3
_NEW_TOKENS = 72
_MODEL = Path(__file__).resolve().parent.parent / "benchmarks" / "models" / "deepseek_v3_tiny"
# What the small model has read is Python. The first one's continuation is shown.
_PROMPTS = (
    'for line in lines:\n    if line.startswith("#"):\n        continue\n    name, value = line.split("=", 1)\n    ',
    "import os\nimport sys\nimport argparse\n\n\ndef main():\n    parser = argparse.",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n        self._items.",
    "try:\n    import json\nexcept ImportError:\n    ",
)


@dataclass(frozen=True, slots=True)
class _Plan:
    """One engine. ``flashmap`` are the variables that choose what FlashMap does in it."""

    title: str
    speculate: bool
    flashmap: dict[str, str]


_PLANS = (
    _Plan("no speculation, no FlashMap", False, {"FLASHMAP_DISABLE": "1"}),
    _Plan("MTP, automatic choice", True, {}),
    _Plan("MTP, FLASHMAP_IMPL=torch_dense", True, {"FLASHMAP_IMPL": "torch_dense", "FLASHMAP_CHECK": "1"}),
)


@dataclass(frozen=True, slots=True)
class EngineRow:
    """What one engine did. Counts are of attention calls, one for each layer and step, over all layers (the drafter's too).

    ``steps`` are each request's verify steps, together. ``text`` is the first prompt's continuation. ``left`` says why calls stayed with vLLM, by reason code. ``largest_difference`` is from vLLM's own kernel on the same input, over
    all layers and steps; None where nothing was compared.
    """

    title: str
    seconds: float
    text: str
    steps: int
    drafted: int
    accepted: int
    routed: int
    left: dict[str, int]
    tokens_equal: bool
    largest_difference: float | None

    @property
    def tokens_per_step(self) -> float:
        """The target's own token and the accepted drafts, of a request's verify step; 1 without speculation."""
        return 1 + self.accepted / self.steps if self.steps else 1.0


@dataclass(frozen=True, slots=True)
class OpRow:
    """One implementation on one shape: milliseconds a call, largest error against the fp32 reference, whether it is chosen; or why not it."""

    shape: str
    implementation: str
    milliseconds: float | None
    error: float | None
    chosen: bool
    declined: str = ""


def main(json: bool = False, model: Path | None = None) -> int:
    """Both halves. ``json``: one JSON object on stdout, and progress on stderr. ``model``: the folder of a DeepSeek with an MTP layer,
    if not the small one. Returns 1 if tokens differ or the engine could not run."""
    say = _Progress(sys.stderr if json else sys.stdout)
    engines, problem = engine_rows(say, model or _MODEL)
    say.note("\nThe op by itself: every implementation on a few shapes ...")
    ops = op_table()
    if json:
        print(jsonlib.dumps({"engine": [asdict(row) for row in engines], "problem": problem, "op": [asdict(row) for row in ops]}, indent=2))
    else:
        _show(engines, ops)
        if problem:
            print(f"\n{problem}")
    return int(bool(problem) or not all(row.tokens_equal for row in engines))


# -- the engine ---------------------------------------------------------------------------------------------------------


def engine_rows(say: _Progress, model: Path) -> tuple[list[EngineRow], str | None]:
    """Run the engines: (a row for each, None), or (what there is, what went wrong)."""
    if not (model / "config.json").exists():
        return [], (
            f"The engine's half needs a model, and there is none in {model}: run the demo from a checkout, "
            "which has a small one in benchmarks/models, or name the folder of a DeepSeek with an MTP layer: flashmap demo --model DIR."
        )
    if importlib.util.find_spec("vllm") is None:
        return [], "The engine's half needs vLLM, which is not in this environment: `make demo` sets one up."
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name="flashmap_verify"):
        return [], "vLLM cannot see the plugin: install the distribution flashmap-verify into this environment."

    rows: list[EngineRow] = []
    with tempfile.TemporaryDirectory(prefix="flashmap-demo-") as name:
        folder = Path(name)
        first: list[list[int]] | None = None
        for number, plan in enumerate(_PLANS, start=1):
            with say.step(f"Engine {number} of {len(_PLANS)}: {plan.title}") as tell:
                result = _run_engine(plan, model, folder / str(number), tell)
            if isinstance(result, str):
                return rows, result
            first = result["tokens"] if first is None else first
            rows.append(_row(plan, result, folder / str(number), first))
    return rows, None


def _row(plan: _Plan, result: dict[str, Any], stats: Path, plain: list[list[int]]) -> EngineRow:
    from flashmap.adapters import observe

    report = observe.collect(stats)
    return EngineRow(
        plan.title,
        result["seconds"],
        result["text"],
        result["steps"],
        result["drafted"],
        result["accepted"],
        report.total("routed"),
        report.codes("left"),
        result["tokens"] == plain,
        None if math.isnan(report.largest) else report.largest,
    )


def _run_engine(plan: _Plan, model: Path, stats: Path, tell: Callable[[str], None]) -> dict[str, Any] | str:
    """Start a process with one engine, pass on what FlashMap logs there. Its result, or what it printed last."""
    stats.mkdir()
    result, log = stats / "result", stats / "log"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHMAP_", "VLLM_"))}
    environment = {**kept, **_ENGINE_ENV, **plan.flashmap, "FLASHMAP_STATS_DIR": str(stats)}
    task = jsonlib.dumps({"model": str(model), "speculate": plan.speculate})
    told: set[str] = set()
    with open(log, "w") as out:
        process = subprocess.Popen([sys.executable, "-m", "flashmap.demo", task, str(result)], env=environment, stdout=out, stderr=out)
        while process.poll() is None:
            time.sleep(0.2)
            for line in log.read_text(errors="replace").splitlines():
                at = line.find("flashmap")
                if "] flashmap" in line and line[at:] not in told:
                    told.add(line[at:])
                    tell(line[at:])
    if process.returncode or not result.exists():
        return f"The engine failed ({plan.title}). The end of its log:\n{log.read_text(errors='replace')[-3000:]}"
    done: dict[str, Any] = jsonlib.loads(result.read_text())
    return done


def _serve(task: dict[str, Any]) -> dict[str, Any]:
    """In the engine's process: generate greedily. What FlashMap does here comes from the environment alone."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=task["model"],
        speculative_config={"method": "mtp", "num_speculative_tokens": _DRAFT_TOKENS} if task["speculate"] else None,
        dtype="float32",  # tokens can then be compared: in bf16 the engine's own code paths break near-ties differently
        attention_backend="CPU_MLA",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_seqs=4,
        seed=0,
        disable_log_stats=False,
    )
    start = time.monotonic()
    outputs = llm.generate(list(_PROMPTS), SamplingParams(temperature=0, max_tokens=_NEW_TOKENS, ignore_eos=True), use_tqdm=False)
    seconds = time.monotonic() - start
    metrics = {m.name.rsplit("num_", 1)[-1]: getattr(m, "value", 0) for m in llm.get_metrics() if "spec_decode" in m.name}
    llm.llm_engine.engine_core.shutdown()
    return {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "text": outputs[0].outputs[0].text,
        "seconds": seconds,
        "steps": int(metrics.get("drafts", 0)),
        "drafted": int(metrics.get("draft_tokens", 0)),
        "accepted": int(metrics.get("accepted_tokens", 0)),
    }


# -- the op -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shape:
    title: str
    requests: int
    tokens: int
    keys: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    latent: bool = False
    tree: bool = False


_SHAPES = (
    _Shape("GQA 32/8 heads of 128, 8 requests, chain of 17, 2,000 keys", 8, 17, 2000, 32, 8, 128, 128),
    _Shape("GQA 8/2 heads of 64, 16 requests, tree of 16, 500 keys", 16, 16, 500, 8, 2, 64, 64, tree=True),
    _Shape("MLA 16 heads of 576/512, 4 requests, chain of 3, 1,000 keys", 4, 3, 1000, 16, 1, 576, 512, latent=True),
)


def op_table() -> list[OpRow]:
    """Every registered implementation on a few shapes in bf16, on the GPU if there is one."""
    import torch

    from flashmap.core import Declined, dispatch, registry, verify_attention
    from flashmap.core.request import DeviceInfo, VerifyRequest

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for shape in _SHAPES:
        q, kv, mask = _inputs(shape, device)
        call: dict[str, Any] = {
            "cu_seqlens_q": torch.arange(shape.requests + 1, dtype=torch.int32, device=device) * shape.tokens,
            "max_query_len": shape.tokens,
            "mask": mask,
        }
        chosen = dispatch.decide(VerifyRequest.of(q, kv, **call), DeviceInfo.of(device), dispatch.Policy()).winner
        want = verify_attention(q.float(), _in_fp32(kv), **call, impl="reference")
        assert not isinstance(want, tuple)
        out = q.new_empty(q.shape[0], shape.heads, shape.v_dim)
        for name in registry.names():
            try:
                verify_attention(q, kv, **call, out=out, impl=name)
            except Declined as declined:
                rows.append(OpRow(shape.title, name, None, None, False, "; ".join(map(str, declined.reasons))))
                continue
            error = float((out.float() - want).abs().max())
            milliseconds = _time(functools.partial(verify_attention, q, kv, **call, out=out, impl=name), device)
            rows.append(OpRow(shape.title, name, milliseconds, error, name == chosen))
    return rows


def _inputs(shape: _Shape, device: torch.device) -> tuple[torch.Tensor, PagedKV, TreeMask | None]:
    """Random q and cache in shuffled pages of 16; the draft tokens are the last keys."""
    import torch

    from flashmap.core import PagedKV, TreeMask

    draw = torch.Generator().manual_seed(0)
    pages = -(-shape.keys // 16)
    table = torch.randperm(shape.requests * pages, generator=draw).int().view(shape.requests, pages).to(device)
    lens = torch.full((shape.requests,), shape.keys, dtype=torch.int32, device=device)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw).to(device, torch.bfloat16)

    k = normal(shape.requests * pages, 16, shape.kv_heads, shape.dim)
    v = None if shape.latent else normal(shape.requests * pages, 16, shape.kv_heads, shape.v_dim)
    kv = PagedKV(k, v, table, lens, v_head_dim=shape.v_dim if shape.latent else None)
    q = normal(shape.requests * shape.tokens, shape.heads, shape.dim)
    if not shape.tree:
        return q, kv, None
    sees = torch.eye(shape.tokens, dtype=torch.bool)
    for token in range(1, shape.tokens):  # a binary tree: a token sees itself and what its parent sees
        sees[token] |= sees[(token - 1) // 2]
    data = sees.expand(shape.requests, -1, -1).contiguous().to(device)
    return q, kv, TreeMask(data, "qlen")


def _in_fp32(kv: PagedKV) -> PagedKV:
    from flashmap.core import PagedKV

    v = None if kv.v is None else kv.v.float()
    return PagedKV(kv.k.float(), v, kv.block_table, kv.kv_lens, v_head_dim=kv.v_head_dim if v is None else None)


def _time(run: Callable[[], object], device: torch.device, budget_s: float = 1.0) -> float:
    """Median milliseconds of a call, warm."""
    import torch

    times: list[float] = []
    while not times or (sum(times) < budget_s * 1e3 and len(times) < 50):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[len(times) // 2]


# -- what is printed ----------------------------------------------------------------------------------------------------


class _Progress:
    """A line for each step, with a spinner where rich and a terminal are there, and its time when it is done."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._console: Any = None
        if stream.isatty() and importlib.util.find_spec("rich") is not None:
            from rich.console import Console

            self._console = Console(file=stream, highlight=False)

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    @contextmanager
    def step(self, text: str) -> Iterator[Callable[[str], None]]:
        """Inside, call what it yields with lines to show below the step."""
        start = time.monotonic()
        if self._console is None:
            self.note(f"{text} ...")
            yield lambda line: self.note(f"    {line}")
            self.note(f"    done after {time.monotonic() - start:.1f} s")
            return
        with self._console.status(text):
            yield lambda line: self._console.print(f"    {line}", style="dim", markup=False)
        self._console.print(f"{text}: {time.monotonic() - start:.1f} s", markup=False)


def _show(engines: list[EngineRow], ops: list[OpRow]) -> None:
    if engines:
        print(f"\nThe first prompt, and what the model makes of it ({engines[-1].title}):\n")
        print("\n".join(f"    {line}" for line in f"{_PROMPTS[0]}»{engines[-1].text.rstrip()}«".splitlines()))
        print(f"\nvLLM's CPU engine, greedy, fp32, {len(_PROMPTS)} requests (calls: one for each layer and step, the MTP layer's too)\n")
        heads = ("", "tokens", "tokens a step", "drafts accepted", "verify calls", "left to vLLM (why)", "largest difference", "time")
        _print_table(heads, [_engine_cells(row, first=row is engines[0]) for row in engines])
    print("\nThe op, bf16 (error: the largest, against the reference in fp32; * is what would be chosen here)\n")
    _print_table(("shape", "implementation", "ms", "error", ""), list(_op_cells(ops)))


def _engine_cells(row: EngineRow, *, first: bool) -> tuple[str, ...]:
    verify = row.routed + sum(n for code, n in row.left.items() if code not in ("decode", "prefill", "metadata"))
    left = ", ".join(f"{n} {code}" for code, n in sorted(row.left.items(), key=lambda item: -item[1])) or "-"
    return (
        row.title,
        "the baseline" if first else "equal" if row.tokens_equal else "DIFFERENT",
        f"{row.tokens_per_step:.2f}",
        f"{row.accepted} of {row.drafted} ({row.accepted / row.drafted:.0%})" if row.drafted else "-",
        f"{row.routed} of {verify} routed" if verify else "-",
        left,
        "-" if row.largest_difference is None else f"{row.largest_difference:.1e}",
        f"{row.seconds:.1f} s",
    )


def _op_cells(ops: list[OpRow]) -> Iterator[tuple[str, ...]]:
    shown = ""
    for row in ops:
        title, shown = ("" if row.shape == shown else row.shape), row.shape
        if row.milliseconds is None or row.error is None:
            yield title, row.implementation, "-", "-", f"declined: {row.declined}"
        else:
            yield title, row.implementation + (" *" if row.chosen else ""), f"{row.milliseconds:.2f}", f"{row.error:.1e}", ""


def _print_table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(line[i]) for line in (heads, *rows)) for i in range(len(heads))]
    for line in (heads, tuple("-" * w for w in widths), *rows):
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":  # the process of one engine
    Path(sys.argv[2]).write_text(jsonlib.dumps(_serve(jsonlib.loads(sys.argv[1]))))
