"""Runs vLLM engines for the tests: ``python run_engine.py PLAN.json``. vLLM is imported once, each engine gets a fork of it.

The plan: {"out": directory, "prompts": [text], "runs": [{"name", "model": directory, "dtype", "speculative": vLLM's speculative_config or
None, "env": {variable: value}, "phases": [{"name", "env", "tokens"}], "install": backends to hook by hand or None}]}. A run's
phases use one engine, one after the other. Results are {out}/{name}.json, what the engine printed is {out}/{name}.log.
"""

import json
import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads bound to cores wait for each other when something else runs there
}
# What every engine imports, in the order in which it does. It takes longer than all the rest.
SLOW_IMPORTS = ("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.deepseek_mtp")
TOKENS = 32  # new ones of each prompt, where a phase says nothing else


def set_env(values: dict) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def serve(run: dict, prompts: list[str]) -> dict:
    """Start the run's engine and go through its phases."""
    set_env({**ENGINE_ENV, **run.get("env", {})})
    result: dict = {"name": run["name"], "phases": {}, "hooked": [], "declined": []}
    if run.get("install"):
        from flashmap.adapters import install

        install("vllm", backends=run["install"])
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    llm = LLM(
        model=run["model"],
        dtype=run["dtype"],
        speculative_config=run["speculative"],
        attention_backend=run["backend"],
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_seqs=4,
        seed=0,
        disable_log_stats=False,
    )
    result["start_s"] = time.monotonic() - started
    for phase in run["phases"]:
        set_env(phase.get("env", {}))
        sampling = SamplingParams(temperature=0, max_tokens=phase.get("tokens", TOKENS), ignore_eos=True)
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        found = {"tokens": [list(o.outputs[0].token_ids) for o in outputs], "report": take_report()}
        found |= {"prompts": [list(o.prompt_token_ids) for o in outputs], "texts": [o.outputs[0].text for o in outputs]}
        found["metrics"] = {m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
        result["phases"][phase["name"]] = found
    if "flashmap.adapters.vllm" in sys.modules:
        installation = sys.modules["flashmap.adapters.vllm"]._installation
        if installation is not None:
            result["hooked"] = [str(h) for h in installation.hooked]
            result["declined"] = [r.code for r in installation.declined]
    llm.llm_engine.engine_core.shutdown()
    result["seconds"] = time.monotonic() - started
    return result


def take_report() -> dict | None:
    """This process's counters and differences, which then begin anew. None where FlashMap was not loaded here."""
    observe = sys.modules.get("flashmap.adapters.observe")
    if observe is None:
        return None
    from dataclasses import asdict

    from flashmap.core import stats

    here = observe.here()
    report = {"counts": [[*k, n] for k, n in here.counts.items()], "layers": {k: asdict(d) for k, d in here.layers.items()}}
    stats.reset()
    observe.reset()
    return report


def main() -> int:
    plan = json.loads(Path(sys.argv[1]).read_text())
    out = Path(plan["out"])
    for module in SLOW_IMPORTS:
        import_module(module)

    failed = 0
    for run in plan["runs"]:
        sys.stdout.flush()
        child = os.fork()
        if child:
            failed += os.waitpid(child, 0)[1] != 0
            continue
        log = os.open(out / f"{run['name']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            result = serve(run, plan["prompts"])
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        (out / f"{run['name']}.json").write_text(json.dumps(result))
        sys.exit(0)  # so that exit handlers run, as in an application
    return failed


if __name__ == "__main__":
    sys.exit(main())
