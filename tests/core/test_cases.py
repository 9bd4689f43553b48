"""The cases from the field on which engines and kernel libraries have gone wrong, for every implementation of ours.

Numbers are from shared notes on upstream issues; each test names the issue.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from mean_case import DIM, NAN, attend, bits, mean_case, near, rows, tokens, tree_mask

from flashmap.core import PagedKV, SlotKV, TreeMask
from flashmap.core.testing import Case, build, compare, expected

CHAIN, FORK = bits("100 110 111", "100 110 101")
LAYOUTS = ("full", "qlen", "packed")


def test_1_siblings_share_a_position(impl: str, dtype: torch.dtype, device: str) -> None:
    """sgl-project/sglang#39287, #39160: a window by row instead of by position."""
    for layout in LAYOUTS:
        mask = tree_mask([FORK], layout, [3], device=device)
        arguments = mean_case(
            [[1, 2, 4]], [[8, 16, 32]], dtype=dtype, device=device, mask=mask, window=1, positions=torch.tensor([3, 4, 4], device=device)
        )
        assert rows(attend(impl, arguments)) == near([6, 12, 20], dtype)


def test_2_the_full_mask_keeps_its_row_length(impl: str, dtype: torch.dtype, device: str) -> None:
    """sgl-project/sglang#9279: under a window the mask's rows were taken to be shorter."""
    for noise in (0, 1, 255):
        mask = tree_mask(bits("10 11", "10 01"), "full", [5, 2], noise=noise, device=device)
        assert mask.data.numel() == 14 + 8
        for extra in ({}, {"mask": TreeMask(mask.data, "full", torch.tensor([0, 14], device=device))}):
            arguments = mean_case([[1, 2, 3, 4, 5], [10, 20]], [[6, 7], [30, 40]], dtype=dtype, device=device, mask=mask, window=3)
            arguments |= {"positions": torch.tensor([5, 6, 2, 3], device=device), **extra}
            assert rows(attend(impl, arguments)) == near([4.5, 5.5, 20, 70 / 3], dtype)


@pytest.mark.parametrize("layout", ["paged", "slots"])
def test_3_does_the_length_include_the_draft_tokens(impl: str, dtype: torch.dtype, device: str, layout: str) -> None:
    """sgl-project/sglang#26512, #26628: both conventions, at times in one backend."""
    wanted = near([4, 40 / 6, 10], dtype)
    arguments = mean_case([[1, 2, 3, 4]], [[10, 20, 30]], layout=layout, page_size=8, dtype=dtype, device=device)
    assert rows(attend(impl, arguments)) == wanted
    apart = mean_case([[1, 2, 3, 4]], [[10, 20, 30]], draft="dense", layout=layout, page_size=8, dtype=dtype, device=device)
    kv = apart["kv"]  # the list's tail and everything behind the fourth token is poison
    assert kv.v.isnan().any()
    assert rows(attend(impl, apart)) == wanted


@pytest.mark.parametrize("layout", LAYOUTS)
def test_4_every_request_has_its_own_tree(impl: str, dtype: torch.dtype, device: str, layout: str) -> None:
    """vllm-project/vllm#40809: one tree served the whole batch."""
    right = {id(CHAIN): [1, 1.5, 7 / 3], id(FORK): [1, 1.5, 2.5]}
    for trees in ([CHAIN, FORK], [FORK, FORK], [FORK, CHAIN]):
        mask = tree_mask(trees, layout, [0, 0], device=device)
        arguments = mean_case([[], []], [[1, 2, 4], [1, 2, 4]], dtype=dtype, device=device, mask=mask)
        assert rows(attend(impl, arguments)) == near([x for tree in trees for x in right[id(tree)]], dtype)


def test_5_the_neighbours_do_not_change_the_answer(impl: str, device: str) -> None:
    """lightseekorg/tokenspeed#904: the number of splits came from the batch. (fp16 alone: half a minute in the interpreter.)"""
    others = (0, 1, 15, 16, 17, 63, 64, 65)
    shape: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "fp16"}
    for order in ((8,), tuple(range(9)), tuple(reversed(range(9)))):
        prefixes = tuple((*others, 300)[r] for r in order)
        case = Case("neighbours", **shape, query_lens=(4,) * len(order), prefix_lens=prefixes, ids=order)
        arguments = build(case, device)
        found = attend(impl, arguments)
        result = compare(case, arguments, expected(arguments), found, None)
        assert result.outcome == "ok", result
        assert torch.equal(found, attend(impl, build(case, device)))


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("table", ["stale", "-1"])
def test_6_a_batch_that_shrinks(impl: str, dtype: torch.dtype, device: str, gone: int, table: str) -> None:
    """sgl-project/sglang#28569: a graph captured for four requests, replayed for two."""
    two = mean_case([[1, 3], [5]], [[2, 6], [7, 9]], layout="paged", dtype=dtype, device=device)
    arguments = mean_case([[1, 3], [5], [0], [0]], [[2, 6], [7, 9], [0, 0], [0, 0]], layout="paged", dtype=dtype, device=device)
    kv = arguments["kv"]
    poison = kv.block_table[2:][kv.block_table[2:] > 0].long()
    kv.k[poison], kv.v[poison] = NAN, NAN
    if table == "-1":
        kv.block_table[2:] = -1
    kv.kv_lens[2:] = gone
    arguments["cu_seqlens_q"].copy_(torch.tensor([0, 2, 4, 4, 4]))
    arguments["q"][4:] = NAN
    arguments["out"] = torch.full_like(arguments["q"], 77)
    out = attend(impl, arguments)
    assert rows(out[:4]) == rows(attend(impl, two)) == near([2, 3, 6, 7], dtype)
    assert (out[4:] == 77).all()


def test_7_how_long_the_index_buffer_is_says_nothing(impl: str, dtype: torch.dtype, device: str) -> None:
    """sgl-project/sglang#27338: buffers sized for the maximum, their tails old."""
    torch.manual_seed(0)
    k, v = (torch.randn(8, 1, DIM, dtype=dtype, device=device) for _ in range(2))
    k[6], v[6] = NAN, NAN
    q = torch.randn(2, 1, DIM, dtype=dtype, device=device)
    indptr = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    used = torch.tensor([4, 0, 2, 7, 1], dtype=torch.int32, device=device)
    tail = torch.tensor([-1, 2**31 - 1, 6], dtype=torch.int32, device=device).repeat(1364)[: 4096 - 5]
    cu = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    results = [
        attend(impl, {"q": q, "kv": SlotKV(k, v, indptr, indices), "cu_seqlens_q": cu, "max_query_len": 1})
        for indices in (used, torch.cat((used, tail)))
    ]
    assert torch.equal(*results) and results[0].isfinite().all()


@pytest.mark.parametrize("length", [64, 65, 67, 128])
def test_8_several_query_tokens_on_a_latent_cache(impl: str, dtype: torch.dtype, device: str, length: int) -> None:
    """vllm-project/vllm#51065, #51848: the page behind the last is not in the table."""
    heads, size, count = 16, 64, -(-length // 64)
    k = torch.full((4, size, 1, 576), NAN, dtype=dtype)
    table = torch.full((1, 4), -1, dtype=torch.int32)
    for page, at in zip((3, 1)[:count], range(count), strict=True):
        table[0, at] = page
        n = min(size, length - at * size)
        k[page, :n, 0, :512] = torch.arange(at * size, at * size + n, dtype=dtype)[:, None]
        k[page, :n, 0, 512:] = 0
    q = torch.zeros(4, heads, 576, dtype=dtype, device=device)
    kv = PagedKV(k.to(device), None, table.to(device), torch.tensor([length], dtype=torch.int32, device=device), v_head_dim=512)
    cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
    out = attend(impl, {"q": q, "kv": kv, "cu_seqlens_q": cu, "max_query_len": 4})
    assert rows(out) == near([(length - 4 + t) / 2 for t in range(4)], dtype)


@pytest.mark.parametrize("layout", ["page 1", "page 4", "page 64", "slots"])
def test_9_a_page_id_is_not_a_slot_id(impl: str, dtype: torch.dtype, device: str, layout: str) -> None:
    """sglang 0.5.16 and 0.5.23, the FA3 latent branch with trees: slots handed on as pages."""
    q = torch.zeros(2, 1, DIM, dtype=dtype, device=device)
    length = torch.tensor([6], dtype=torch.int32, device=device)
    values = torch.full((320,), NAN)
    ids, size = {
        "page 1": ([9, 2, 5, 0, 8, 3], 1),
        "page 4": ([3, 1], 4),
        "page 64": ([2], 64),
        "slots": ([9, 2, 5, 0, 8, 3], 1),
    }[layout]
    for i in range(6):
        values[ids[i // size] * size + i % size] = i + 1
    v = tokens(values.tolist())[: 5 * max(size, 2)].to(device, dtype)
    k = torch.where(v.isnan(), v, torch.zeros_like(v))
    index = torch.tensor([ids], dtype=torch.int32, device=device)
    if layout == "slots":
        kv: PagedKV | SlotKV = SlotKV(k, v, torch.tensor([0, 6], dtype=torch.int32, device=device), index[0])
    else:
        kv = PagedKV(k.view(-1, size, 1, DIM), v.view(-1, size, 1, DIM), index, length)
    cu = torch.tensor([0, 2], dtype=torch.int32, device=device)
    assert rows(attend(impl, {"q": q, "kv": kv, "cu_seqlens_q": cu, "max_query_len": 2})) == near([3, 3.5], dtype)


def test_10_the_prefix_part_of_the_mask_is_not_read(impl: str, dtype: torch.dtype, device: str) -> None:
    """sgl-project/sglang#3731, #37553: up to half of the time for bytes that are all ones by definition."""
    results = []
    for noise in (1, 0, None):
        mask = tree_mask([CHAIN, FORK], "full", [3, 3], noise=noise or 0, device=device)
        if noise is None:
            mask.data.view(6, 6)[:, :3] = torch.randint(0, 256, (6, 3), dtype=torch.uint8, device=device)
        arguments = mean_case([[0, 0, 0]] * 2, [[1, 2, 4]] * 2, dtype=dtype, device=device, mask=mask)
        results.append(attend(impl, arguments))
    assert rows(results[0]) == near([1 / 4, 3 / 5, 7 / 6, 1 / 4, 3 / 5, 5 / 5], dtype)
    assert all(torch.equal(a, b) for a, b in pairwise(results))


def test_11_nothing_in_the_middle_of_something(impl: str, dtype: torch.dtype, device: str) -> None:
    """vllm-project/vllm#33664: a request of length 0 made the index of its last block -1."""
    arguments = mean_case(
        [[1], [], [], [5, 5, 5, 5], [8]], [[2, 3], [], [7], [], [10]], layout="paged", page_size=2, dtype=dtype, device=device
    )
    assert arguments["kv"].kv_lens.tolist() == [3, 0, 1, 4, 2] and (arguments["kv"].block_table[1] == -1).all()
    q = arguments["q"]
    arguments["q"] = torch.cat((q, torch.full_like(q, NAN)))
    arguments["out"] = torch.full_like(arguments["q"], 77)
    out = attend(impl, arguments)
    assert rows(out[:4]) == near([1.5, 2, 7, 9], dtype)
    assert (out[4:] == 77).all()
