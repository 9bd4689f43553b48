"""One SGLang engine on one GPU, with FlashMap or without: the time of a verify step, or what a trained model says.

    python benchmarks/sglang_engine.py steps --model DIR --draft DIR --steps 5 --topk 4 --draft-tokens 8 --backend triton --ctx 8192,32768
    python -m benchmarks.sglang_engine text --model benchmarks/models/llama_tiny --draft benchmarks/models/llama_tiny_eagle_sglang --steps 5 --topk 4

``steps``: DIR needs a config.json alone, weights are made up. The prompts stay in the prefix cache, so that 1 token and 1 + 96 tokens
differ by the verify steps; the fastest of three of each is taken. ``text``: held-out prompts of the small models, greedy;
new tokens over verify steps, the tokens, and FlashMap's counters. ``--flashmap check`` also runs SGLang's own kernel in every
call and keeps the largest difference; it goes without CUDA graphs.

One JSON line, appended to --json-out. Compare runs of one machine, made one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 96
FLASHMAP = {
    "off": {"SGLANG_PLUGINS": "none"},  # a name that no plugin has
    "auto": {},
    "forced": {"FLASHMAP_IMPL": "triton_splitkv", "FLASHMAP_STRICT": "1"},
    "check": {"FLASHMAP_IMPL": "triton_splitkv", "FLASHMAP_STRICT": "1", "FLASHMAP_CHECK": "1"},
}


def main() -> None:
    args = _arguments()
    stats = tempfile.mkdtemp(prefix="flashmap-stats-")
    os.environ.update({"HF_HUB_OFFLINE": "1", "FLASHMAP_STATS_DIR": stats, **FLASHMAP[args.flashmap]})
    import sglang
    import torch

    start = time.monotonic()
    engine = sglang.Engine(**_engine_arguments(args))
    row: dict[str, Any] = {
        "what": args.what,
        "machine": torch.cuda.get_device_name(),
        "versions": {"sglang": sglang.__version__, "torch": torch.__version__},
        "flashmap": args.flashmap,
        "model": args.model.name,
        **{name: getattr(args, name) for name in ("backend", "method", "steps", "topk", "draft_tokens", "page_size")},
        "init_s": round(time.monotonic() - start, 1),
    }
    row |= _step_times(engine, args.ctx) if args.what == "steps" else _text(engine, args)
    row["counts"], row["differences"] = _counters(stats)
    line = json.dumps(row)
    print(line, flush=True)
    if args.json_out:
        with open(args.json_out, "a") as out:
            print(line, file=out)
    engine.shutdown()


def _arguments() -> argparse.Namespace:
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "text"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="drafter's folder (default: the target's own MTP layer)")
    parser.add_argument("--method", help="SGLang's speculative algorithm (default: EAGLE with --draft, NEXTN without)")
    parser.add_argument("--backend", default="triton", help="SGLang's attention backend (default triton)")
    parser.add_argument("--steps", type=int, default=3, help="of the drafter")
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--draft-tokens", type=int, help="default: steps + 1 for a chain, 8 for a tree")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--ctx", default="8192", help="steps: prompt lengths, comma separated")
    parser.add_argument("--prompts", type=int, default=8, help="text: how many")
    parser.add_argument("--new-tokens", type=int, default=96, help="text: of each prompt")
    parser.add_argument("--flashmap", choices=tuple(FLASHMAP), default="auto")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    args.ctx = [int(n) for n in args.ctx.split(",")]
    args.method = args.method or ("EAGLE" if args.draft else "NEXTN")
    args.draft_tokens = args.draft_tokens or (args.steps + 1 if args.topk == 1 else 8)
    for folder in filter(None, (args.model, args.draft)):
        if not (folder / "config.json").is_file():
            parser.error(f"there is no config.json in {folder}")
    return args


def _engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model_path": str(args.model),
        "skip_tokenizer_init": True,
        "attention_backend": args.backend,
        "speculative_algorithm": args.method,
        "speculative_num_steps": args.steps,
        "speculative_eagle_topk": args.topk,
        "speculative_num_draft_tokens": args.draft_tokens,
        "page_size": args.page_size,
        "random_seed": 0,
        "log_level": "info",
        "grammar_backend": "none",
        "disable_cuda_graph": args.flashmap == "check",
    }
    if args.draft:
        found["speculative_draft_model_path"] = str(args.draft)
    if args.what == "steps":
        return found | {
            "load_format": "dummy",
            "mem_fraction_static": 0.6,
            "max_running_requests": 2,
            "context_length": max(args.ctx) + 1024,
        }
    # A small pool, so that several engines can share a GPU.
    return found | {"mem_fraction_static": 0.5, "max_total_tokens": 16384, "max_running_requests": args.prompts, "context_length": 2048}


def _step_times(engine: Any, lengths: list[int]) -> dict[str, Any]:
    draw = random.Random(0)
    found = {}
    for length in lengths:
        prompt = [draw.randrange(10, 30000) for _ in range(length)]
        for _ in range(2):  # fills the prefix cache, and compiles what a hit still needs
            _generate(engine, [prompt], 1)
        one = min(_generate(engine, [prompt], 1)[0] for _ in range(3))
        seconds, outputs = min((_generate(engine, [prompt], 1 + STEPS) for _ in range(3)), key=lambda run: run[0])
        steps = outputs[0]["meta_info"]["spec_verify_ct"]
        found[length] = {"ms_per_step": round((seconds - one) / steps * 1e3, 3), "verify_steps": steps}
    return {"ctx": found}


def _text(engine: Any, args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.models import data

    prompts = data.prompts(args.prompts, longest=600)
    runs = [_generate(engine, prompts, args.new_tokens) for _ in range(2)]
    tokens = [[list(map(int, output["output_ids"])) for output in outputs] for _, outputs in runs]
    steps = sum(output["meta_info"]["spec_verify_ct"] for output in runs[1][1])
    accepted = round(sum(map(len, tokens[1])) / steps, 3)
    return {"seconds": round(runs[1][0], 3), "tokens_per_step": accepted, "repeat_same": tokens[0] == tokens[1], "tokens": tokens[1]}


def _generate(engine: Any, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[dict[str, Any]]]:
    start = time.monotonic()
    outputs = engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True})
    return time.monotonic() - start, outputs


def _counters(folder: str) -> tuple[list[list[Any]], dict[str, list[float]]]:
    from flashmap.adapters import observe

    time.sleep(1)  # the scheduler writes them every half second
    report = observe.collect(folder)
    differences = {name: [found.calls, found.largest, found.scale] for name, found in report.layers.items()}
    return [[*key, n] for key, n in sorted(report.counts.items())], differences


if __name__ == "__main__":
    main()
