"""Properties over random page tables, ragged lengths and masks: against the reference, and of the op itself.

``Case`` poisons whatever a table, list or mask does not name, so each example also checks that nothing else is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashmap.core import PagedKV, SlotKV, TreeMask, verify_attention
from flashmap.core.testing import Case, assert_conforms, build, check_order

FAST = settings(max_examples=60, deadline=None, derandomize=True)
SLOW = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def random_cases(draw: st.DrawFn, *, most_requests: int = 5, most_rows: int = 9, longest: int = 90) -> Case:
    draft = draw(st.sampled_from(["cache", "slots", "dense"]))
    shortest = -3 if draft == "cache" else 0
    lens = draw(st.lists(st.tuples(st.integers(0, most_rows), st.integers(shortest, longest)), max_size=most_requests))
    mask = draw(st.sampled_from([None, "full", "qlen", "packed"]))
    window = draw(st.none() | st.integers(0, longest))
    latent = draw(st.booleans())
    heads: dict[str, Any] = {
        "heads": 4,
        "kv_heads": draw(st.sampled_from([1, 2, 4])),
        "head_dim": 16,
        "v_head_dim": draw(st.sampled_from([8, 16])),
    }
    return Case(
        "random",
        **(heads | {"kv_heads": 1, "latent": True} if latent else heads),
        query_lens=tuple(rows for rows, _ in lens),
        prefix_lens=tuple(max(prefix, -rows) for rows, prefix in lens),
        padded=draw(st.integers(0, 2)),
        layout=draw(st.sampled_from(["paged", "slots"])),
        page_size=draw(st.integers(1, 50)),
        draft=draft,
        mask=mask,
        mask_indptr=mask in ("full", "qlen") and draw(st.booleans()),
        mask_bytes=draw(st.sampled_from(["bool", "uint8", "int8"])),
        window=window,
        positions=(mask is not None and window is not None) or draw(st.booleans()),
        kv_start=draw(st.booleans()),
        sinks=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 1.5])),
        lse=draw(st.booleans()),
        scales=draw(st.sampled_from(["none", "host", "device"])),
        int64=draw(st.booleans()),
        strided=draw(st.booleans()),
        slack=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 1000)),
        ids=tuple(draw(st.integers(0, 7)) for _ in lens),
    )


@FAST
@given(random_cases())
def test_torch_dense_is_the_reference(case: Case) -> None:
    assert_conforms("torch_dense", case)


@FAST
@given(random_cases(), st.integers(12, 20))
def test_torch_dense_in_blocks_of_any_size(case: Case, log_bytes: int) -> None:
    from flashmap.core.implementations import torch_dense

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_dense, "_BLOCK_BYTES", {"cpu": 1 << log_bytes})
        patch.setattr(torch_dense, "_ALIGN", 1)
        assert_conforms("torch_dense", replace(case, dtype="bf16"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU Triton is not interpreted")
@SLOW
@given(random_cases(most_requests=3, most_rows=5, longest=40))
def test_triton_is_the_reference(case: Case) -> None:
    assert_conforms("triton_splitkv", case)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(random_cases(most_requests=4))
def test_a_request_does_not_depend_on_its_company(case: Case) -> None:
    distinct = replace(case, ids=tuple(range(len(case.query_lens))), lse=True)
    result = check_order("torch_dense", distinct)
    assert result.outcome == "ok", result


@FAST
@given(random_cases(), st.randoms(use_true_random=False))
def test_where_tokens_lie_does_not_matter(case: Case, random: Any) -> None:
    """Moving the pages or slots about, and renaming them in the tables, changes no bit."""
    arguments = build(case)
    kv = arguments["kv"]
    order = list(range(kv.k.shape[0]))
    random.shuffle(order)
    places = torch.tensor(order)  # the page that was i goes to places[i]
    k, v = torch.empty_like(kv.k), None if kv.v is None else torch.empty_like(kv.v)
    k[places] = kv.k
    if v is not None:
        v[places] = kv.v

    def renamed(ids: torch.Tensor, size: int = 1) -> torch.Tensor:
        inside = (ids >= 0) & (ids < kv.k.shape[0] * size)
        page = places[torch.where(inside, ids, 0).long() // size]
        return torch.where(inside, page * size + ids % size, ids).to(ids.dtype)

    if isinstance(kv, PagedKV):
        moved: PagedKV | SlotKV = PagedKV(k, v, renamed(kv.block_table), kv.kv_lens, kv.v_head_dim, kv.kv_start)
    else:
        moved = SlotKV(k, v, kv.indptr, renamed(kv.indices), kv.v_head_dim, kv.kv_start)
    other = {**arguments, "kv": moved, "out": arguments["out"].clone(), "return_lse": False}
    if "draft_slots" in arguments:
        other["draft_slots"] = renamed(arguments["draft_slots"], kv.page_size)
    found = verify_attention(**{**arguments, "return_lse": False}, impl="torch_dense")
    assert torch.equal(found, verify_attention(**other, impl="torch_dense"))


@FAST
@given(st.lists(st.integers(1, 70), min_size=1, max_size=4), st.integers(0, 3), st.data())
def test_the_three_mask_layouts_say_the_same(lens: list[int], slack: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    trees = [torch.rand(n, n, generator=generator) < 0.5 for n in lens]
    prefixes = [data.draw(st.integers(0, 20)) for _ in lens]
    case = Case("masks", heads=2, head_dim=16, query_lens=tuple(lens), prefix_lens=tuple(prefixes), slack=slack)
    arguments = build(case)
    most, total = arguments["max_query_len"], arguments["q"].shape[0]
    packed = torch.zeros(total, -(-most // 64), dtype=torch.int64)
    wide = torch.zeros(len(lens), most, most, dtype=torch.bool)
    row = 0
    for r, tree in enumerate(trees):
        wide[r, : lens[r], : lens[r]] = tree
        for j in range(lens[r]):
            bit = 1 << j % 64 if j % 64 < 63 else -(1 << 63)
            packed[row : row + lens[r], j // 64] += tree[:, j] * bit
        row += lens[r]
    full = torch.cat(
        [torch.cat((torch.zeros(n, p, dtype=torch.bool), tree), 1).flatten() for n, p, tree in zip(lens, prefixes, trees, strict=True)]
    )
    tight = torch.cat([tree.flatten() for tree in trees])
    starts = torch.tensor([0, *[n * n for n in lens]]).cumsum(0)
    masks = [TreeMask(full, "full"), TreeMask(wide, "qlen"), TreeMask(tight, "qlen", starts), TreeMask(packed, "packed")]
    outs = [verify_attention(**{**arguments, "mask": mask, "out": arguments["out"].clone()}, impl="torch_dense") for mask in masks]
    assert all(torch.equal(outs[0], out) for out in outs[1:])
