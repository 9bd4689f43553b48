"""Fixtures of the SGLang tier. All of it is skipped where SGLang cannot be imported; no GPU is needed."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
spec = find_spec("sglang")
MISSING = spec is None or spec.origin is None  # without an origin it is this folder
collect_ignore = [] if not MISSING else [path.name for path in HERE.glob("test_*.py")]

if not MISSING and not torch.cuda.is_available():
    sys.path.insert(0, str(HERE / "stubs"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(autouse=True)
def parallel():
    """SGLang's own idea of the process group: one rank."""
    import sglang.srt.runtime_context as context

    names = ("tp_size", "attn_tp_size", "attn_dcp_size", "attn_cp_size", "attn_dp_size")
    ranks = ("attn_tp_rank", "attn_dcp_rank", "attn_cp_rank")
    with context.get_parallel().override(**dict.fromkeys(names, 1), **dict.fromkeys(ranks, 0)):
        yield


@pytest.fixture(autouse=True)
def removed():
    """Nothing is hooked before and after a test."""
    import flashmap.adapters.sglang as adapter

    adapter._forget()
    yield
    adapter._forget()


@pytest.fixture
def installed(monkeypatch):
    """A function: install with this implementation, before or after the backends are made."""
    from flashmap.adapters import install

    def do(impl="torch_dense", **options):
        if impl is not None:
            monkeypatch.setenv("FLASHMAP_IMPL", impl)
        return install("sglang", **options)

    return do
