"""examples/deepseek_eagle_vllm.py as a reader runs it, with the tiny model on a CPU."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("vllm")


def test_deepseek_mtp(python_path, tmp_path):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHMAP_", "VLLM_", "TRITON_"))}
    settings = {
        "PYTHONPATH": python_path,
        "FLASHMAP_STATS_DIR": str(tmp_path),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    engine = '{"enforce_eager": true, "dtype": "float32"}'
    command = [sys.executable, "examples/deepseek_eagle_vllm.py", "--tiny", "--max-new-tokens", "48", engine]
    done = subprocess.run(command, cwd=ROOT, env=kept | settings, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(r"^(without|with) +(\S+) +(\S+) +(\S+)$", done.stdout, re.MULTILINE)
    assert [name for name, *_ in rows] == ["without", "with"]
    without, with_ours = (tuple(map(float, row[1:])) for row in rows)
    assert without[0] == with_ours[0] > 1.5, "the same drafts are accepted"
    assert min(*without, *with_ours) > 0
    from flashmap.adapters import observe

    assert observe.collect(tmp_path).total("routed") > 0
