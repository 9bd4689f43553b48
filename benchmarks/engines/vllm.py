"""vLLM, by its LLM class in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), with CUDA graphs of whole decode steps."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.engines import Generated, Request


def start(args: argparse.Namespace) -> Vllm:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # compiles for two minutes, and the greedy tokens here need none
    if args.profile:
        args.profile.mkdir(parents=True, exist_ok=True)
    import vllm

    return Vllm(vllm.LLM(**_arguments(args)), vllm.__version__)


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": str(args.model),
        "skip_tokenizer_init": True,
        "seed": 0,
        "disable_log_stats": False,  # they count the verify steps
        "enable_prefix_caching": True,
        # Not the whole GPU, so that several engines can share it.
        "gpu_memory_utilization": 0.02,
        "compilation_config": {"mode": 0, "cudagraph_mode": "NONE" if args.flashmap == "check" else "FULL_DECODE_ONLY"},
    }
    if args.backend:
        found["attention_backend"] = args.backend
    if args.page_size:
        found["block_size"] = args.page_size
    if args.method != "none":
        found["speculative_config"] = {"method": args.method, "num_speculative_tokens": args.steps}
        if args.draft:
            found["speculative_config"]["model"] = str(args.draft)
        if args.method == "ngram":
            found["speculative_config"] |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    if "steps" in args.what:
        found |= {"load_format": "dummy", "dtype": "bfloat16", "max_num_seqs": 1, "max_model_len": max(args.ctx) + 1024}
        found["kv_cache_memory_bytes"] = 8 << 30
    else:
        found |= {"max_num_seqs": 32, "max_model_len": 2048, "kv_cache_memory_bytes": 1 << 30}
    return found | args.engine_args


class Vllm:
    def __init__(self, engine: Any, version: str) -> None:
        self._engine, self.version = engine, version

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Generated:
        return self.serve([(prompt, new_tokens) for prompt in prompts], len(prompts))

    def serve(self, requests: list[Request], batch: int) -> Generated:
        engine, tokens = self._engine.llm_engine, dict[str, list[int]]()
        before, start = self._drafts(), time.monotonic()
        waiting = [(str(i), *request) for i, request in reversed(list(enumerate(requests)))]
        running = 0
        while waiting or running:
            while waiting and running < batch:
                name, prompt, new_tokens = waiting.pop()
                engine.add_request(name, {"prompt_token_ids": prompt}, _sampling(new_tokens))
                running += 1
            for output in engine.step():
                if output.finished:
                    tokens[output.request_id] = list(map(int, output.outputs[0].token_ids))
                    running -= 1
        seconds = time.monotonic() - start
        found = [tokens[str(i)] for i in range(len(requests))]
        return Generated(seconds, found, self._drafts() - before or sum(map(len, found)))

    def memory(self) -> int:
        import torch

        return torch.cuda.memory_reserved()

    def profile(self, prompt: list[int], folder: Path) -> None:
        import torch

        with torch.profiler.profile() as profiler:
            self.generate([prompt], 8)
        profiler.export_chrome_trace(str(folder / "vllm.trace.json.gz"))

    def close(self) -> None:
        self._engine.llm_engine.engine_core.shutdown()

    def _drafts(self) -> int:
        """Verify steps so far, of all requests."""
        return int(sum(metric.value for metric in self._engine.get_metrics() if metric.name == "vllm:spec_decode_num_drafts"))


def _sampling(new_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
