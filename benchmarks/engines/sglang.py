"""SGLang, by its Engine: the scheduler in a process of its own, CUDA graphs and overlap scheduling as it starts them."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

from benchmarks.engines import Generated, Request

ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN", "ngram": "NGRAM"}


def start(args: argparse.Namespace) -> Sglang:
    import sglang

    return Sglang(sglang.Engine(**_arguments(args)), sglang.__version__)


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model_path": str(args.model),
        "skip_tokenizer_init": True,
        "random_seed": 0,
        "log_level": "info",
        "grammar_backend": "none",
        "disable_cuda_graph": args.flashmap == "check",
        "disable_prefill_cuda_graph": True,  # they take most of the start
        "sleep_on_idle": True,  # other engines measure while this one waits
        "attention_backend": args.backend,
    }
    if args.method != "none":
        found |= {
            "speculative_algorithm": ALGORITHMS[args.method],
            "speculative_num_steps": args.steps,
            "speculative_eagle_topk": args.topk,
            "speculative_num_draft_tokens": args.draft_tokens,
        }
    if args.draft:
        found["speculative_draft_model_path"] = str(args.draft)
    if args.page_size:
        found["page_size"] = args.page_size
    # Pools of a fixed size, so that several engines can share a GPU.
    if "steps" in args.what:
        found |= {
            "load_format": "dummy",
            "mem_fraction_static": 0.9,
            "max_total_tokens": sum(args.ctx) + 4096,
            "max_running_requests": 2,
            "context_length": max(args.ctx) + 1024,
        }
    else:
        found |= {"mem_fraction_static": 0.5, "max_total_tokens": 32768, "max_running_requests": 32, "context_length": 2048}
    return found | args.engine_args


class Sglang:
    def __init__(self, engine: Any, version: str) -> None:
        self._engine, self.version = engine, version

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Generated:
        start = time.monotonic()
        return _generated(start, self._engine.generate(input_ids=prompts, sampling_params=_sampling(new_tokens)))

    def serve(self, requests: list[Request], batch: int) -> Generated:
        places = asyncio.Semaphore(batch)

        async def one(prompt: list[int], new_tokens: int) -> dict[str, Any]:
            async with places:
                output: dict[str, Any] = await self._engine.async_generate(input_ids=prompt, sampling_params=_sampling(new_tokens))
                return output

        async def every() -> list[dict[str, Any]]:
            return await asyncio.gather(*(one(*request) for request in requests))

        start = time.monotonic()
        return _generated(start, self._engine.loop.run_until_complete(every()))

    def memory(self) -> int:
        import torch

        free, total = torch.cuda.mem_get_info()  # the scheduler is another process
        return total - free

    def profile(self, prompt: list[int], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._engine.start_profile(output_dir=str(folder), activities=["CPU", "GPU"], with_stack=False, record_shapes=False)
        self.generate([prompt], 8)
        self._engine.stop_profile()

    def close(self) -> None:
        self._engine.shutdown()


def _sampling(new_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}


def _generated(start: float, outputs: list[dict[str, Any]]) -> Generated:
    steps = sum(output["meta_info"].get("spec_verify_ct") or output["meta_info"]["completion_tokens"] for output in outputs)
    return Generated(time.monotonic() - start, [list(map(int, output["output_ids"])) for output in outputs], steps)
