"""What an adapter asks of dispatch."""

import logging

import pytest

from flashmap.core import Declined, DeviceInfo, Limits, VerifyRequest, dispatch, prepare, registry, tables
from flashmap.core.testing import Case, build

CPU = DeviceInfo("cpu", "cpu")
KERNEL = "vllm.CPU_ATTN"


def request(**changes):
    return VerifyRequest(heads=8, kv_heads=2, head_dim=64, v_head_dim=64, max_query_len=4, **changes)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("FLASHMAP_IMPL", "FLASHMAP_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dispatch, "_announced", set())
    dispatch._decide.cache_clear()


def test_a_cpu_leaves_the_call_to_the_engine():
    decision = dispatch.route(request(), CPU, KERNEL)
    assert decision.winner is None and [r.code for r in decision.reasons] == ["engine_faster"]


def test_a_name_forces_it(monkeypatch):
    monkeypatch.setenv("FLASHMAP_IMPL", "torch_dense")
    assert dispatch.route(request(), CPU, KERNEL).winner == "torch_dense"


def test_a_name_that_cannot_serve_leaves_the_call_with_one_warning(monkeypatch, caplog):
    monkeypatch.setenv("FLASHMAP_IMPL", "triton_splitkv")
    with caplog.at_level(logging.INFO, logger="flashmap"):
        for count in (1, 2):
            decision = dispatch.route(request(num_requests=count), CPU, KERNEL)
    assert decision.winner is None and "device" in [r.code for r in decision.reasons]
    assert [r.levelname for r in caplog.records] == ["WARNING"] and KERNEL in caplog.text


def test_and_raises_under_strict(monkeypatch):
    monkeypatch.setenv("FLASHMAP_IMPL", "triton_splitkv")
    monkeypatch.setenv("FLASHMAP_STRICT", "1")
    with pytest.raises(Declined, match="triton_splitkv"):
        dispatch.route(request(), CPU, KERNEL)


def test_prepare_prepares_what_a_call_will_choose(monkeypatch):
    """The table in force has its say in both."""
    prepared = []
    monkeypatch.setattr(dispatch, "preference", lambda request, device, table: ("reference",) if table == "the table" else ("torch_dense",))
    monkeypatch.setattr(tables, "in_force", lambda device: "the table")
    monkeypatch.setattr(type(registry.get("reference")), "prepare", lambda self, *_: prepared.append(self.name))
    request = VerifyRequest.of(**build(Case("any")))
    assert prepare(request, Limits(1, 4, 64), device="cpu") == "reference" and prepared == ["reference"]


def test_each_implementation_that_serves_some_size_of_batch_is_prepared(monkeypatch):
    """A table may prefer one for few requests and another for many, and engines capture a graph for each."""
    prepared = []
    order = lambda request, *_: ("reference" if request.num_requests <= 3 else "torch_dense",)  # noqa: E731
    monkeypatch.setattr(dispatch, "preference", order)
    for name in ("reference", "torch_dense"):
        note = lambda self, request, limits, _: prepared.append((self.name, request.num_requests, limits.max_requests))  # noqa: E731
        monkeypatch.setattr(type(registry.get(name)), "prepare", note)
    request = VerifyRequest.of(**build(Case("any")))
    assert prepare(request, Limits(8, 4, 64), device="cpu") == "torch_dense"
    assert sorted(prepared) == [("reference", 3, 3), ("torch_dense", 8, 8)]
    prepared.clear()
    assert prepare(request, Limits(8, 4, 64), device="cpu", impl="reference") == "reference" and prepared == [("reference", 8, 8)]
