"""For all tests: Triton's interpreter where there is no GPU, and no state from one test to the next."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

# Triton reads it when it is imported. An engine's own Triton code is not meant for the interpreter, so its tests go without.
engine = find_spec("vllm")  # without an origin it is tests/vllm, a folder beside this file
if not torch.cuda.is_available() and (engine is None or engine.origin is None):
    os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores already
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def clean_state(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No FLASHMAP_* variables, no table of a user's, no cached or announced decisions, no counts."""
    from flashmap.core import dispatch, stats, tables

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "no-config"))
    for name in [name for name in os.environ if name.startswith("FLASHMAP_")]:
        monkeypatch.delenv(name)
    dispatch._decide.cache_clear()
    tables._in_force.cache_clear()
    dispatch._announced.clear()
    stats.reset()
    yield
    dispatch._decide.cache_clear()
    tables._in_force.cache_clear()
    stats.reset()


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
