"""Counters per (implementation, outcome, reason code)."""

from __future__ import annotations

import pytest
from mean_case import mean_case

from flashmap.core import Capability, Declined, Implementation, registry, stats, verify_attention


def test_count_snapshot_reset() -> None:
    stats.count("a", "run")
    stats.count("a", "run", times=2)
    stats.count("b", "declined", "dtype")
    found = stats.snapshot()
    assert found == {("a", "run", ""): 3, ("b", "declined", "dtype"): 1}
    stats.count("a", "run")
    assert found[("a", "run", "")] == 3, "a snapshot is a copy"
    stats.reset()
    assert stats.snapshot() == {}


def test_the_op_counts_what_runs_and_what_is_declined() -> None:
    arguments = mean_case([[1]], [[2]])
    verify_attention(**arguments)
    verify_attention(**arguments, impl="reference")
    verify_attention(**arguments, impl="reference")
    assert stats.snapshot() == {("torch_dense", "run", ""): 1, ("reference", "run", ""): 2}

    stats.reset()
    registry.register(Implementation("narrow", Capability(devices=frozenset({"cuda"}), dtypes=frozenset({"bf16"}))))
    try:
        with pytest.raises(Declined):
            verify_attention(**arguments, impl="narrow")
    finally:
        registry.unregister("narrow")
    assert stats.snapshot() == {("narrow", "declined", "device"): 1, ("narrow", "declined", "dtype"): 1}


def test_bad_input_counts_nothing() -> None:
    with pytest.raises(ValueError):
        verify_attention(**mean_case([[1]], [[2]]), softcap=-1.0)
    assert stats.snapshot() == {}
