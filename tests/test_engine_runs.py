"""The runs behind docs/engines.md: each is one that engine_bench.py takes, and the runner tells those that fail."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import engine_bench, engine_runs

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("whats", [("steps",), ("text", "acceptance", "soak")])
def test_arguments_are_those_of_engine_bench(engine, whats, tmp_path, monkeypatch):
    runs = engine_runs.runs(engine, whats)
    assert len({run.name for run in runs}) == len(runs) >= 8
    assert {what for run in runs for what in run.whats} == set(whats)
    assert sum(len(run.whats) for run in runs) == sum(len(engine_runs.runs(engine, [what])) for what in whats)
    for run in runs:
        words = run.arguments
        arguments = [engine_runs._model(w, tmp_path) if words[i - 1] in ("--model", "--draft") else w for i, w in enumerate(words)]
        monkeypatch.setattr(sys, "argv", ["engine_bench", engine, *run.whats, *arguments])
        args = engine_bench._arguments()
        assert ("e3" in run.name) == (args.method == "eagle3")
        assert run.name.endswith(f"{args.backend}-{args.flashmap}")


def test_a_run_that_fails_is_told(tmp_path):
    """No engine is installed where this runs."""
    command = [sys.executable, "-m", "benchmarks.engine_runs", "sglang", "text", "--only", "ds-chain-fa3", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "3 of 3 runs failed: ds-chain-fa3-off" in done.stderr
    assert "No module named 'sglang'" in (tmp_path / "ds-chain-fa3-off.log").read_text()


def test_a_pattern_that_matches_nothing_is_an_error():
    command = [sys.executable, "-m", "benchmarks.engine_runs", "vllm", "steps", "--only", "nothing", "--out", "x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--only 'nothing' matches no run" in done.stderr
