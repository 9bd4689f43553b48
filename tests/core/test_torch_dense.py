"""torch_dense beyond conformance: its speed, its memory, and caches of unusual strides."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from mean_case import mean_case, near, rows

from flashmap.core import PagedKV, SlotKV, verify_attention
from flashmap.core.testing import Case, build


def best(arguments: dict[str, Any], impl: str, times: int) -> float:
    """CPU seconds, so that what else runs on the machine counts less."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        verify_attention(**arguments, impl=impl)
        taken.append(time.process_time() - start)
    return min(taken)


def test_much_faster_than_the_reference() -> None:
    """8 requests x 17 tokens x 2,000 keys x 32/8 heads, one thread. The bound is for a machine on which much else runs."""
    shape: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    arguments = build(Case("speed", **shape, query_lens=(17,) * 8, prefix_lens=(1983,) * 8))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ratio = max(best(arguments, "reference", 2) / best(arguments, "torch_dense", 3) for _ in range(2))
    finally:
        torch.set_num_threads(threads)
    assert ratio > 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_memory_is_bounded_by_the_block_and_not_by_the_context(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmap.core.implementations import torch_dense

    in_use, most, elsewhere = 0, 0, 0
    workspace = torch_dense._Workspace
    take, clear = workspace.take, workspace.clear

    def watch(self: Any, *shape: int, **more: Any) -> torch.Tensor:
        nonlocal in_use, most, elsewhere
        found = take(self, *shape, **more)
        in_use += found.nbytes
        most = max(most, in_use)
        elsewhere += found.untyped_storage().data_ptr() != self._memory.untyped_storage().data_ptr()
        return found

    def done(self: Any) -> None:
        nonlocal in_use
        in_use = 0
        clear(self)

    monkeypatch.setattr(workspace, "take", watch)
    monkeypatch.setattr(workspace, "clear", done)
    monkeypatch.setattr(torch_dense, "_BLOCK_BYTES", {"cpu": 1 << 20})
    case = Case("long", query_lens=(4, 1, 2), prefix_lens=(20000, 3000, 100), page_size=64, dtype=dtype)
    verify_attention(**build(case), impl="torch_dense")
    assert not elsewhere and 1 << 19 < most <= 1 << 20


def test_k_and_v_are_never_repeated_for_the_heads_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = set()
    bmm = torch.bmm

    def watch(a: torch.Tensor, b: torch.Tensor, **more: Any) -> torch.Tensor:
        batches.add(b.shape[0])
        return bmm(a, b, **more)

    monkeypatch.setattr(torch, "bmm", watch)
    verify_attention(**build(Case("group", heads=8, kv_heads=2, query_lens=(3,), prefix_lens=(10,))), impl="torch_dense")
    assert batches == {2}


@pytest.mark.parametrize("strides", ["expanded pages", "heads outermost", "odd strides", "one token"])
def test_caches_of_unusual_strides(strides: str) -> None:
    arguments = mean_case([[1, 2]], [[6]], layout="paged", page_size=2)
    kv: PagedKV = arguments["kv"]
    dim = kv.k.shape[-1]
    wanted = [3.0]
    if strides == "expanded pages":  # all pages are one
        k, v = (x[1:2].expand(5, -1, -1, -1) for x in (kv.k, kv.v))
        wanted = [4 / 3]  # 1, 2, and again 1
    elif strides == "heads outermost":
        k, v = (x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3) for x in (kv.k, kv.v))
    elif strides == "odd strides":
        k, v = (torch.nn.functional.pad(x, (0, 3, 0, 1, 0, 1))[:, :2, :1, :dim] for x in (kv.k, kv.v))
    else:
        arguments |= {"kv": SlotKV(kv.k[1, :1], kv.v[1, :1], torch.tensor([0, 1]), torch.tensor([0]))}
        assert rows(verify_attention(**arguments, impl="torch_dense")) == near([1])
        return
    assert rows(verify_attention(**{**arguments, "kv": PagedKV(k, v, kv.block_table, kv.kv_lens)}, impl="torch_dense")) == near(wanted)


@pytest.mark.parametrize("what", ["pool", "table", "indices"])
def test_empty_caches(what: str) -> None:
    """Nothing is cached yet: no page in the pool, no column in the table, no entry in the list."""
    arguments = mean_case([[]], [[4, 6]], draft="dense", layout="slots" if what == "indices" else "paged")
    kv = arguments["kv"]
    if what == "pool":
        arguments["kv"] = PagedKV(kv.k[:0], kv.v[:0], kv.block_table, kv.kv_lens)
    elif what == "table":
        arguments["kv"] = PagedKV(kv.k, kv.v, kv.block_table[:, :0], kv.kv_lens + 9)
    else:
        arguments["kv"] = SlotKV(kv.k, kv.v, kv.indptr, kv.indices[:0])
    for impl in ("reference", "torch_dense"):
        assert rows(verify_attention(**arguments, impl=impl)) == near([4, 5])
