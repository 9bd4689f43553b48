"""Importing costs nothing: an engine imports a plugin in every process it starts."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "triton", "numpy", "vllm", "sglang", "flashinfer", "typer", "rich")


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_import_loads_nothing_heavy() -> None:
    loaded = python("import sys; before = set(sys.modules); import flashmap; print(*sorted(set(sys.modules) - before))").split()
    assert "flashmap" in loaded
    assert not [name for name in loaded if name.split(".")[0] in HEAVY]
    assert [name for name in loaded if name.startswith("flashmap.")] == [], "not even the rest of the package"


def test_env_loads_nothing_heavy() -> None:
    loaded = python("import sys, flashmap.env; print(*sorted(sys.modules))").split()
    assert not [name for name in loaded if name.split(".")[0] in HEAVY]


def test_import_takes_less_than_50_ms() -> None:
    """The best of several, since other processes may hold the machine up."""
    code = "import time; start = time.perf_counter(); import flashmap; print(time.perf_counter() - start)"
    best = min(float(python(code)) for _ in range(5))
    assert best < 0.050


def test_core_never_imports_an_engine_or_triton() -> None:
    loaded = python("import sys, flashmap.core, flashmap.core.testing; print(*sorted(sys.modules))").split()
    assert not [name for name in loaded if name.split(".")[0] in ("triton", "vllm", "sglang") or name.startswith("flashmap.adapters")]


def test_import_does_no_work() -> None:
    """No logging set-up, no environment read: a bad variable is an error when it is needed, not before."""
    code = (
        "import os, logging; os.environ['FLASHMAP_STRICT'] = 'maybe'; import flashmap, flashmap.core; "
        "print(len(logging.getLogger('flashmap').handlers), len(logging.getLogger().handlers))"
    )
    assert python(code).split() == ["0", "0"]
