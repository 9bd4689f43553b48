"""One engine on one GPU, with FlashMap or without it: the time of a verify step, what a trained model says and accepts, or many requests.

    python -m benchmarks.engine_bench sglang steps --model DIR --draft DIR --steps 5 --topk 4 --backend triton --ctx 8192,32768
    python -m benchmarks.engine_bench vllm text --model benchmarks/models/llama_tiny --draft benchmarks/models/llama_tiny_eagle --steps 5

``steps``: DIR needs a config.json alone, weights are made up. The prompts stay in the prefix cache, so that 1 token and 1 + 64 tokens
differ by the verify steps; the fastest of three of each is taken. ``text``: held-out prompts of the small models, greedy;
new tokens over verify steps, and the tokens. ``acceptance``: the first of them for 512 prompts, so many that two kernels' near-ties
cancel out. ``soak``: 1, 8 and 32 requests in flight, of mixed lengths, 28 for each place in the batch; by how much the engine's memory
on the GPU grew after the first round, and how many requests got the tokens that they get alone. One engine can do these three in turn.

``--flashmap check`` also runs the engine's own kernel in every call and keeps the largest difference; it goes without CUDA graphs.
One JSON line each, appended to --json-out. Compare runs of one machine, made one after the other; ``--turn`` lets several engines load at once
(engine_runs.py).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.engines import Engine, Generated
from flashmap.bench import report

STEPS = 64
ACCEPTANCE_GROUPS, ACCEPTANCE_PROMPTS = 16, 32
SOAK_BATCHES = (1, 8, 32)
SOAK_REQUESTS = 28  # of each place in the batch: 88 new tokens on average, at 3.5 to 4.5 a step, are more than 512 steps
FLASHMAP = {
    "off": {"FLASHMAP_DISABLE": "1"},
    "auto": {},
    "forced": {"FLASHMAP_IMPL": "triton_splitkv", "FLASHMAP_STRICT": "1"},
    "check": {"FLASHMAP_IMPL": "triton_splitkv", "FLASHMAP_STRICT": "1", "FLASHMAP_CHECK": "1"},
    "fa3_tail": {"FLASHMAP_IMPL": "fa3_tail"},
}


def main() -> None:
    args = _arguments()
    stats = tempfile.mkdtemp(prefix="flashmap-stats-")
    os.environ.update({"HF_HUB_OFFLINE": "1", "FLASHMAP_STATS_DIR": stats, **FLASHMAP[args.flashmap]})
    start = time.monotonic()
    engine: Engine = importlib.import_module(f"benchmarks.engines.{args.engine}").start(args)
    import torch

    same: dict[str, Any] = {
        "name": args.name,
        "date": report.now(),
        "commit": report.commit(),
        "engine": args.engine,
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {args.engine: engine.version, "torch": torch.__version__},
        "flashmap": args.flashmap,
        "model": args.model.name,
        **{name: getattr(args, name) for name in ("backend", "method", "steps", "topk", "draft_tokens", "page_size", "engine_args")},
        "init_s": round(time.monotonic() - start, 1),
    }
    _wait_for_all(args.turn)
    for what in args.what:
        with _turn(args.turn, alone=what in ("steps", "soak"), last=what == args.what[-1]):
            row = same | {"what": what} | MEASURES[what](engine, args)
            row["counts"], row["differences"] = _counters(stats)
            line = json.dumps(row)
            print(line, flush=True)
            if args.json_out:
                with open(args.json_out.with_name(args.json_out.name.replace("WHAT", what)), "a") as out:
                    out.write(f"{line}\n")  # at once, as others write there too
            if what != args.what[-1]:
                continue
            if args.profile:
                engine.profile(_random_prompt(args.ctx[-1]), args.profile)
            engine.close()


def _arguments() -> argparse.Namespace:
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("sglang", "vllm"))
    parser.add_argument("what", nargs="+", choices=tuple(MEASURES))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="drafter's folder (default: the target's own MTP layer)")
    parser.add_argument(
        "--method", choices=("eagle", "eagle3", "mtp", "ngram", "none"), help="default: what the drafter is, mtp without --draft"
    )
    parser.add_argument("--backend", help="the engine's attention backend (default: its own choice)")
    parser.add_argument("--steps", type=int, default=3, help="of the drafter")
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--draft-tokens", type=int, help="default: steps + 1 for a chain, 8 for a tree")
    parser.add_argument("--page-size", type=int, help="default: the engine's")
    parser.add_argument("--ctx", default="8192", help="steps: prompt lengths, comma separated")
    parser.add_argument("--prompts", type=int, default=8, help="text: how many")
    parser.add_argument("--new-tokens", type=int, default=96, help="text: of each prompt")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more arguments of the engine, as JSON")
    parser.add_argument("--flashmap", choices=tuple(FLASHMAP), default="auto")
    parser.add_argument("--profile", type=Path, help="steps: then write a torch profiler trace of a few steps into this folder")
    parser.add_argument("--name", help="of the run, for the record")
    parser.add_argument("--turn", type=Path, help="once loaded, append a line to FILE.ready, wait for FILE, and measure under its lock")
    parser.add_argument("--json-out", type=Path, help="a file; WHAT in its name stands for what is measured")
    args = parser.parse_args()
    args.ctx = [int(n) for n in args.ctx.split(",")]
    args.draft_tokens = args.draft_tokens or (args.steps + 1 if args.topk == 1 else 8)
    for folder in filter(None, (args.model, args.draft)):
        if not (folder / "config.json").is_file():
            parser.error(f"there is no config.json in {folder}")
    args.method = args.method or _method(args.draft)
    if args.engine == "vllm" and args.topk > 1:
        parser.error("--topk: vLLM has no trees")
    if "steps" in args.what and len(args.what) > 1:
        parser.error("steps needs an engine of its own: its weights are made up")
    if args.profile and args.what != ["steps"]:
        parser.error("--profile goes with steps")
    return args


def _method(draft: Path | None) -> str:
    """What drafts. An engine that takes an EAGLE3 head for one of EAGLE starts all the same, and accepts next to nothing."""
    if draft is None:
        return "mtp"
    names = json.loads((draft / "config.json").read_text()).get("architectures", [])
    return "eagle3" if any("Eagle3" in name for name in names) else "eagle"


def _wait_for_all(turn: Path | None) -> None:
    if turn is not None:
        with open(f"{turn}.ready", "a") as ready:
            print(os.getpid(), file=ready, flush=True)
        while not turn.exists():
            time.sleep(0.2)


@contextlib.contextmanager
def _turn(turn: Path | None, *, alone: bool, last: bool) -> Iterator[None]:
    """What measures time or the GPU's memory has it ``alone``; texts may be made side by side.

    The ``last`` one lasts until the process ends, and with it what it has of the GPU's memory.
    """
    if turn is None:
        yield
        return
    held = os.open(turn, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    yield
    if not last:
        os.close(held)


def _step_times(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for length in args.ctx:
        prompt = _random_prompt(length)
        for _ in range(2):  # fills the prefix cache, and compiles what a hit still needs
            engine.generate([prompt], 1)
        one = min(engine.generate([prompt], 1).seconds for _ in range(3))
        most = min((engine.generate([prompt], 1 + STEPS) for _ in range(3)), key=lambda run: run.seconds)
        found[length] = {"ms_per_step": round((most.seconds - one) / most.steps * 1e3, 3), "verify_steps": most.steps}
    return {"ctx": found}


def _random_prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(10, 30000) for _ in range(length)]


def _text(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.models import data

    prompts = data.prompts(args.prompts, longest=600)
    first, second = (engine.generate(prompts, args.new_tokens) for _ in range(2))
    return {
        "tokens_per_step": _tokens_per_step(second),
        "repeat_same": first.tokens == second.tokens,
        "prompts": prompts,
        "tokens": second.tokens,
    }


def _acceptance(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.models import data

    prompts = data.prompts(ACCEPTANCE_GROUPS * ACCEPTANCE_PROMPTS, longest=600, seed=1)
    groups = [prompts[i : i + ACCEPTANCE_PROMPTS] for i in range(0, len(prompts), ACCEPTANCE_PROMPTS)]
    found = [engine.generate(group, args.new_tokens) for group in groups]
    every = Generated(0, [tokens for run in found for tokens in run.tokens], sum(run.steps for run in found))
    return {"tokens_per_step": _tokens_per_step(every), "groups": [_tokens_per_step(run) for run in found]}


def _soak(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.models import data

    prompts = data.prompts(16, longest=600)
    draw = random.Random(0)
    found, alone = {}, dict[tuple[int, int], list[int]]()
    for batch in SOAK_BATCHES:
        places = [(draw.randrange(len(prompts)), draw.choice((32, 64, 96, 160))) for _ in range(SOAK_REQUESTS * batch)]
        requests = [(prompts[prompt], new) for prompt, new in places]
        engine.serve(requests[: 4 * batch], batch)
        before = engine.memory()
        run = engine.serve(requests, batch)
        growth = engine.memory() - before
        if batch == 1:
            alone = dict(zip(places, run.tokens, strict=True))
        seen = [tokens == alone[place] for place, tokens in zip(places, run.tokens, strict=True) if place in alone]
        found[batch] = {
            "requests": len(requests),
            "seconds": round(run.seconds, 2),
            "verify_steps_of_all_requests": run.steps,
            "tokens_per_step": _tokens_per_step(run),
            "memory_growth_bytes": growth,
            "as_alone": [sum(seen), len(seen)],
        }
    return {"batch": found}


MEASURES = {"steps": _step_times, "text": _text, "acceptance": _acceptance, "soak": _soak}


def _tokens_per_step(run: Generated) -> float:
    return round(sum(map(len, run.tokens)) / max(run.steps, 1), 3)


def _counters(folder: str) -> tuple[list[list[Any]], dict[str, list[float]]]:
    from flashmap.adapters import observe

    time.sleep(1)  # processes write them every half second
    report = observe.collect(folder)
    differences = {name: [found.calls, found.largest, found.scale] for name, found in report.layers.items()}
    return [[*key, n] for key, n in sorted(report.counts.items())], differences


if __name__ == "__main__":
    main()
