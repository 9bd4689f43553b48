"""`benchmarks/models/train.py --smoke` on a CPU: all of it runs, and what it writes can be loaded."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.models import data
from benchmarks.models.checkpoints import DEEPSEEK, EAGLE, EAGLE3, EAGLE_SGLANG, LLAMA, load_drafter, load_target
from benchmarks.models.speculate import generate

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "name, drafters, folders",
    [(DEEPSEEK, {"MTP": DEEPSEEK}, {DEEPSEEK}), (LLAMA, {"Eagle": EAGLE, "Eagle3": EAGLE3}, {LLAMA, EAGLE, EAGLE_SGLANG, EAGLE3})],
)
def test_smoke(tmp_path: Path, name: str, drafters: dict[str, str], folders: set[str]) -> None:
    command = [sys.executable, "-m", "benchmarks.models.train", "--smoke", "--device", "cpu", "--only", name, "--out", str(tmp_path)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # threads wait for each other where all cores are busy
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == folders

    card = json.loads((tmp_path / f"{name}.training.json").read_text())
    assert card["text"].endswith(data.digest())
    # A model that knows nothing needs 9 bits for one of 512 tokens. Four steps on 384 bytes teach it something.
    assert 2.0 < card["target"]["bits_per_byte"] < 9.0
    log = [json.loads(line) for line in (tmp_path / f"{name}.training.jsonl").read_text().splitlines()]
    assert {row["model"] for row in log} == {"target", *drafters}
    assert all(math.isfinite(row["loss"]) for row in log)

    target = load_target(name, tmp_path)
    prompts = [list(b"import os\n")]
    plain = generate(target, prompts, 6)
    for kind, folder in drafters.items():
        assert all(map(math.isfinite, card[kind]["cross_entropy_by_step"]))
        assert generate(target, prompts, 6, drafter=load_drafter(folder, target, tmp_path)).tokens == plain.tokens
