"""The grid of flashmap.core.testing for each implementation of ours, on this machine's device."""

from __future__ import annotations

import pytest
import torch

from flashmap.core import Declined
from flashmap.core.testing import Case, assert_conforms, cases, check_order, check_repeat

GRID = list(cases("cpu", ("fp32", "fp16", "bf16")))
DENSE = [("reference", case) for case in GRID if case.dtype != "fp16"] + [("torch_dense", case) for case in GRID]
INTERPRETED = [("triton_splitkv", case) for case in GRID if case.dtype != "bf16"]


@pytest.mark.parametrize(("name", "case"), DENSE, ids=str)
def test_grid(name: str, case: Case) -> None:
    assert_conforms(name, case)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the grid, compiled")
@pytest.mark.parametrize(("name", "case"), INTERPRETED, ids=str)
def test_grid_interpreted(name: str, case: Case) -> None:
    assert_conforms(name, case)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU Triton is not interpreted")
def test_bf16_is_declined_by_the_interpreter() -> None:
    with pytest.raises(Declined) as declined:
        assert_conforms("triton_splitkv", Case("bf16", dtype="bf16"))
    assert [reason.code for reason in declined.value.reasons] == ["interpreter_bf16"]


@pytest.mark.parametrize(
    "name", ["torch_dense", pytest.param("triton_splitkv", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU"))]
)
def test_repeated_and_reordered(name: str) -> None:
    case = Case("order", query_lens=(2, 3, 1, 0), prefix_lens=(40, 0, 65, 5), mask="packed", lse=True)
    for check in (check_repeat, check_order):
        result = check(name, case)
        assert result.outcome == "ok", result


@pytest.mark.parametrize("page_size", [1, 16, 512])
def test_longer_than_one_block(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_dense walks the prefix in blocks: many of them here, with requests that end in different ones."""
    from flashmap.core.implementations import torch_dense

    monkeypatch.setattr(torch_dense, "_BLOCK_BYTES", {"cpu": 1 << 16})
    prefixes = (300, 1, 0, 17, 255, 64)
    for more in ({}, {"window": 40}, {"window": 40, "positions": True, "mask": "full", "kv_start": True}):
        case = Case("blocks", query_lens=(3, 2, 4, 1, 0, 2), prefix_lens=prefixes, page_size=page_size, sinks=True, lse=True, **more)
        assert_conforms("torch_dense", case)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs it, compiled")
@pytest.mark.parametrize("last_merges", [False, True])
def test_both_ways_to_merge(monkeypatch: pytest.MonkeyPatch, last_merges: bool) -> None:
    """The grid's fp32 cases: a second kernel merges, or the last program, whose counters are 0 again when a launch has ended."""
    from flashmap.core.implementations.triton_shared.scratch import COUNTERS, Scratch
    from flashmap.core.implementations.triton_splitkv import launch

    for name, value in (("LAST_MERGES", str(int(last_merges))), ("MIN_CHUNK", "16"), ("BLOCK_N", "16")):
        monkeypatch.setenv(f"FLASHMAP_SPLITKV_{name}", value)
    plans, plan_of, taken = [], launch._plan.__wrapped__, []
    take = Scratch.take
    monkeypatch.setattr(launch, "_plan", lambda *args: plans.append(plan_of(*args)) or plans[-1])
    monkeypatch.setattr(Scratch, "take", lambda *args, **more: taken.append(take(*args, **more)) or taken[-1])
    for case in GRID:
        if case.dtype == "fp32":
            assert_conforms("triton_splitkv", case)
    splits = [plan for plan in plans if plan.partials > 1]
    assert len(splits) > len(plans) // 2
    assert all(plan.constants["LAST_MERGES"] is last_merges and plan.merges is not last_merges for plan in splits)
    memory = torch.cat([torch.empty(0).set_(parts.untyped_storage())[:COUNTERS] for parts in taken])
    assert not memory.view(torch.int32).any()
