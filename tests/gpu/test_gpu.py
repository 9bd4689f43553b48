"""On a GPU, with compiled kernels: the grid in every dtype, graphs, bits, order, streams. Skipped where there is none.

python -m pytest tests/gpu
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashmap.core import (
    Declined,
    DeviceInfo,
    Limits,
    PagedKV,
    TreeMask,
    VerifyRequest,
    dispatch,
    prepare,
    registry,
    stats,
    verify_attention,
)
from flashmap.core.testing import (
    Case,
    assert_conforms,
    build,
    cases,
    check_case,
    check_order,
    check_repeat,
    check_replay,
    check_streams,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KERNEL = "triton_splitkv"
COMPOSITES = ("fa3_tail", "fa3", "flashmla_tail")
LIBRARIES = (*COMPOSITES, "flashinfer")  # which is never captured
SMALL = list(cases("cuda", size="small"))
FULL = list(cases("cuda", size="full"))
SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {"heads": 32, "kv_heads": 8, "head_dim": 128},
    "mqa": {"heads": 8, "kv_heads": 1, "head_dim": 128},
    "mla": {"heads": 16, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "latent": True},
}


@pytest.fixture(autouse=True)
def exact_fp32() -> Iterator[None]:
    """The reference's own products must not be rounded to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def conforms(name: str, case: Case) -> None:
    """Declined is a skip that says why: hardware may forbid what the grid asks."""
    try:
        assert_conforms(name, case, "cuda")
    except Declined as declined:
        pytest.skip(str(declined))


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_grid(case: Case) -> None:
    conforms(KERNEL, case)


@pytest.mark.parametrize("case", FULL, ids=str)
def test_full_grid(case: Case) -> None:
    conforms(KERNEL, case)


@pytest.fixture(params=["0", "1"], ids=["merge kernel", "last merges"])
def merging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both ways to merge: the second only runs where it is forced."""
    from flashmap.core.implementations.triton_splitkv import launch

    monkeypatch.setenv("FLASHMAP_SPLITKV_LAST_MERGES", request.param)
    launch._plan.cache_clear()
    yield
    launch._plan.cache_clear()


@pytest.mark.usefixtures("merging")
@pytest.mark.parametrize("case", [case for case in FULL if case.dtype == "bf16"], ids=str)
def test_full_grid_merged_both_ways(case: Case) -> None:
    conforms(KERNEL, case)


@pytest.mark.usefixtures("merging")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kv", [None, "fp8_e4m3"])
@pytest.mark.parametrize("requests", [9, 40, 130])
def test_large_batches(shape: str, kv: str | None, requests: int) -> None:
    """Programs of the merge take 2 and 4 rows there, and counters run out."""
    lens: dict[str, Any] = {"query_lens": (5, 8, 1, 7, 0) * (requests // 5), "prefix_lens": (700, 0, 1300, 65, 200) * (requests // 5)}
    result = check_case(
        KERNEL, Case("large", **SHAPES[shape], **lens, dtype="bf16", kv_dtype=kv, page_size=64, mask="packed", lse=True), "cuda"
    )
    assert result.outcome == "ok", result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("tokens", [2, 16, 40])
def test_every_fp8_value_is_read_right(dtype: torch.dtype, fp8: torch.dtype, tokens: int) -> None:
    """A single key, whose values hold every finite code: the result is that row, and the log-sum-exp its product with q."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    values = torch.where(codes.view(fp8).float().isfinite(), codes, 0).view(2, 128)
    pages = values.expand(2, 16, 2, 128).contiguous().view(fp8)
    q = torch.zeros(tokens, 4, 128, dtype=dtype, device="cuda")
    q[torch.arange(tokens), :, torch.arange(tokens) * 3] = 1
    hidden = TreeMask(torch.zeros(tokens, 1, dtype=torch.int64, device="cuda"), "packed")
    draft = torch.zeros(tokens, 2, 128, dtype=dtype, device="cuda")
    kv = PagedKV(pages[:1], pages[1:], torch.zeros(1, 1, dtype=torch.int32, device="cuda"), torch.ones(1, dtype=torch.int32, device="cuda"))
    starts = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    out, lse = verify_attention(
        q, kv, cu_seqlens_q=starts, max_query_len=tokens, draft_kv=(draft, draft), mask=hidden, scale=1.0, return_lse=True, impl=KERNEL
    )
    rows = values.view(fp8).to(dtype)
    assert torch.equal(out, rows.repeat_interleave(2, 0).expand(tokens, 4, 128))
    products = rows[:, torch.arange(tokens) * 3].T.repeat_interleave(2, 1).float()
    torch.testing.assert_close(lse, products, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in SMALL if case.dtype == "bf16"], ids=str)
def test_torch_dense_runs_on_a_gpu(case: Case) -> None:
    conforms("torch_dense", case)


def test_the_grid_is_served() -> None:
    """Nothing of the grid in fp16 and bf16 is declined from compute capability 9.0 on."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    device = DeviceInfo.of(torch.device("cuda"))
    for case in (*SMALL, *FULL):
        if case.dtype != "fp32":
            reasons = registry.get(KERNEL).why_not(VerifyRequest.of(**build(case, "cuda")), device)
            assert reasons == (), f"{case}: {reasons}"


# -- graphs ---------------------------------------------------------------------------------------------------------------

_BATCH: dict[str, Any] = {"query_lens": (5, 8, 1, 8), "prefix_lens": (700, 0, 3000, 65), "dtype": "bf16"}
REPLAYED: dict[str, dict[str, Any]] = {
    "chain": {},
    "slots": {"layout": "slots"},
    "full": {"mask": "full", "draft": "dense", "layout": "slots"},
    "full indptr": {"mask": "full", "mask_indptr": True, "draft": "dense", "layout": "slots"},
    "qlen": {"mask": "qlen", "page_size": 64},
    "packed slots": {"mask": "packed", "draft": "slots", "int64": True},
    "window tree": {"mask": "packed", "window": 300, "positions": True, "kv_start": True},
    "sinks lse": {"sinks": True, "lse": True, "softcap": 8.0},
    "fp8": {"kv_dtype": "fp8_e4m3", "scales": "device", "page_size": 64},
    "strided": {"strided": True, "page_size": 64},
    "padded": {"padded": 4},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", REPLAYED)
def test_a_graph_replays_on_other_contents(shape: str, name: str) -> None:
    case = Case(f"{shape} {name}", **SHAPES[shape], **{**_BATCH, **REPLAYED[name]})
    result = check_replay(KERNEL, case)
    assert result.outcome == "ok", result


@pytest.mark.usefixtures("merging")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["chain", "qlen", "fp8"])
def test_a_graph_replays_on_other_contents_merged_both_ways(shape: str, name: str) -> None:
    result = check_replay(KERNEL, Case(f"{shape} {name}", **SHAPES[shape], **{**_BATCH, **REPLAYED[name]}))
    assert result.outcome == "ok", result


def test_the_last_program_merges_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever arrives last: 300 launches on one stream, with one counter for each row block, give the same bits."""
    from flashmap.core.implementations.triton_splitkv import launch

    monkeypatch.setenv("FLASHMAP_SPLITKV_LAST_MERGES", "1")
    monkeypatch.setattr(launch, "_plan", launch._plan.__wrapped__)
    arguments = build(Case("one", **SHAPES["mqa"], dtype="bf16", query_lens=(8,), prefix_lens=(20000,)), "cuda")
    outs = [verify_attention(**{**arguments, "out": torch.full_like(arguments["out"], float("nan"))}, impl=KERNEL)[:8] for _ in range(300)]
    assert all(torch.equal(out, outs[0]) for out in outs) and not outs[0].isnan().any()


def captured_short(name: str, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of _BATCH out of a graph captured with lengths of 1 and replayed with the true ones, and out of a call without a graph.

    Engines capture so: the tables are as wide as ever.
    """
    kv, rows = arguments["kv"], sum(_BATCH["query_lens"])
    lens = kv.kv_lens.clone()
    kv.kv_lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify_attention(**arguments, impl=name)
    kv.kv_lens.copy_(lens)
    graph.replay()
    torch.cuda.synchronize()
    eager = verify_attention(**{**arguments, "out": torch.empty_like(arguments["out"])}, impl=name)
    return arguments["out"][:rows], eager[:rows]


def test_a_graph_captured_short_replays_long() -> None:
    arguments = build(Case("long", **SHAPES["gqa"], **_BATCH), "cuda")
    prepare(VerifyRequest.of(**arguments), Limits(4, 8, arguments["kv"].max_kv_len))
    replayed, eager = captured_short(KERNEL, arguments)
    assert torch.equal(replayed, eager)


def test_graphs_outlive_the_growth_of_scratch() -> None:
    """A larger call retires the buffer that an earlier graph points at; the graph stays right."""
    small = Case("small", **SHAPES["gqa"], dtype="bf16", query_lens=(4,), prefix_lens=(2000,))
    arguments = build(small, "cuda")
    request = VerifyRequest.of(**arguments)
    prepare(request, Limits(1, 4, arguments["kv"].max_kv_len))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify_attention(**arguments, impl=KERNEL)
    graph.replay()
    wanted = arguments["out"][:4].clone()
    for rows in (16, 64):
        large = replace(small, heads=64, query_lens=(rows,) * 16, prefix_lens=(2000,) * 16)
        verify_attention(**build(large, "cuda"), impl=KERNEL)
    junk = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
    arguments["out"].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(arguments["out"][:4], wanted)
    del junk


def declines_capture(name: str, arguments: dict[str, Any], code: str) -> None:
    """Under capture that implementation declines the call, for the reason of that code alone."""
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(Declined) as declined, torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")  # torch warns of an empty graph
        verify_attention(**arguments, impl=name)
    assert [reason.code for reason in declined.value.reasons] == [code]


def without_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test it is as if no call had taken scratch."""
    from flashmap.core.implementations.triton_shared import scratch

    monkeypatch.setattr(scratch, "_scratch", {})


def test_a_capture_without_scratch_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("cold", **SHAPES["gqa"], dtype="bf16", query_lens=(61,) * 3, prefix_lens=(9000,) * 3)
    arguments = build(case, "cuda")
    without_scratch(monkeypatch)
    declines_capture(KERNEL, arguments, "scratch")


def test_what_reads_the_host_declines_under_capture() -> None:
    arguments = build(Case("host"), "cuda")
    for name in ("reference", "torch_dense"):
        declines_capture(name, arguments, "capturing")


def test_once_warm_it_neither_allocates_nor_synchronises() -> None:
    arguments = build(Case("warm", **SHAPES["gqa"], **_BATCH, mask="packed"), "cuda")
    for _ in range(2):
        verify_attention(**arguments, impl=KERNEL)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify_attention(**arguments, impl=KERNEL)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# -- bits, order, streams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", [None, "packed"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_repeated_reordered_and_on_two_streams(shape: str, mask: str | None, dtype: str) -> None:
    case = Case(f"{shape} {mask}", **SHAPES[shape], **{**_BATCH, "dtype": dtype}, mask=mask, lse=True)
    for check in (check_repeat, check_order, check_streams):
        result = check(KERNEL, case, "cuda")
        assert result.outcome == "ok", f"{check.__name__}: {result}"


def test_one_long_request_among_many() -> None:
    case = Case("long one", **SHAPES["gqa"], dtype="bf16", query_lens=(4,) * 32, prefix_lens=(*(1,) * 31, 20000), page_size=64)
    result = check_case(KERNEL, case, "cuda")
    assert result.outcome == "ok", result


def test_a_pool_of_more_than_two_to_the_31_elements() -> None:
    """The same pages at the start of a small pool and at the end of a large one, K and V in the halves of one buffer."""
    case = Case("far", **SHAPES["gqa"], dtype="bf16", kv_dtype="fp8_e5m2", page_size=64, query_lens=(4,), prefix_lens=(200,))
    arguments = build(case, "cuda")
    kv = arguments["kv"]
    pages = 2**31 // kv.k[0].numel() + 8
    if torch.cuda.mem_get_info()[0] < 3 * pages * kv.k[0].numel():
        pytest.skip("needs 7 GB of free memory")
    pool = torch.empty(pages, 2, *kv.k.shape[1:], dtype=torch.uint8, device="cuda")
    first = pages - kv.k.shape[0]
    pool[first:, 0], pool[first:, 1] = kv.k.view(torch.uint8), kv.v.view(torch.uint8)
    pool = pool.view(kv.k.dtype)
    table = torch.where((kv.block_table >= 0) & (kv.block_table < pages), kv.block_table + first, -1).int()
    far = PagedKV(pool[:, 0], pool[:, 1], table, kv.kv_lens)
    outs = [verify_attention(**{**arguments, "kv": x, "out": torch.empty_like(arguments["out"])}, impl=KERNEL) for x in (kv, far)]
    assert torch.equal(outs[0][:4], outs[1][:4])


def test_the_automatic_choice_runs() -> None:
    arguments = build(Case("automatic", **SHAPES["gqa"], dtype="bf16"), "cuda")
    winner = dispatch.route(VerifyRequest.of(**arguments), DeviceInfo.of(torch.device("cuda")), None).winner
    verify_attention(**arguments)
    assert winner in (KERNEL, *COMPOSITES) and stats.snapshot() == {(winner, "run", ""): 1}


# -- other libraries' kernels: each test is skipped with the reason where the library, or a part of the call, is not served --------


def ready(name: str, case: Case) -> dict[str, Any]:
    """The case's arguments, or a skip that says why the implementation cannot serve them."""
    arguments = build(case, "cuda")
    reasons = registry.get(name).why_not(VerifyRequest.of(**arguments), DeviceInfo.of(torch.device("cuda")))
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    return arguments


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("case", [case for case in (*SMALL, *FULL) if case.dtype != "fp32"], ids=str)
def test_libraries_conform(name: str, case: Case) -> None:
    ready(name, case)
    assert_conforms(name, case, "cuda")


PAGES: dict[str, dict[str, Any]] = {
    "page 1": {"page_size": 1},
    "page 64": {"page_size": 64},
    "page 128": {"page_size": 128},
    "page 640": {"page_size": 640},  # a multiple of the tiles that FlashAttention 3 may copy whole for a head dimension of 128
}


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", [None, "qlen"])
@pytest.mark.parametrize("page", PAGES)
def test_libraries_never_use_rows_that_are_not_listed(name: str, shape: str, mask: str | None, page: str) -> None:
    """Many rows and long pages, with NaN behind every request's last key."""
    lens: dict[str, Any] = {"query_lens": (17, 64, 3, 0, 40), "prefix_lens": (1300, 65, 5000, 9, 0)}
    case = Case(f"{shape} {page}", **SHAPES[shape], **PAGES[page], **lens, mask=mask, dtype="bf16", padded=2)
    ready(name, case)
    result = check_case(name, case, "cuda")
    assert result.outcome == "ok", result


@pytest.mark.parametrize("name", COMPOSITES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("what", REPLAYED)
def test_composites_replay_on_other_contents(name: str, shape: str, what: str) -> None:
    case = Case(f"{shape} {what}", **SHAPES[shape], **{**_BATCH, "page_size": 64, **REPLAYED[what]})
    ready(name, case)
    result = check_replay(name, case)
    assert result.outcome == "ok", result


@pytest.mark.parametrize("name", COMPOSITES)
@pytest.mark.parametrize("shape", SHAPES)
def test_composites_captured_short_replay_long(name: str, shape: str) -> None:
    case = Case("long", **SHAPES[shape], **{**_BATCH, "page_size": 64}, draft="cache", mask=None if name == "fa3" else "packed")
    arguments = ready(name, case)
    prepare(VerifyRequest.of(**arguments), Limits(4, 8, arguments["kv"].max_kv_len), impl=name)
    replayed, eager = captured_short(name, arguments)
    torch.testing.assert_close(replayed, eager, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", COMPOSITES)
@pytest.mark.parametrize("shape", SHAPES)
def test_composites_in_other_orders_on_two_streams_and_without_a_sync(name: str, shape: str) -> None:
    case = Case(f"{shape} {name}", **SHAPES[shape], **{**_BATCH, "page_size": 64}, mask=None if name == "fa3" else "packed")
    arguments = ready(name, case)
    for check in (check_order, check_streams):
        result = check(name, case, "cuda")
        assert result.outcome == "ok", f"{check.__name__}: {result}"
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify_attention(**arguments, impl=name)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", COMPOSITES)
def test_composites_decline_a_capture_without_scratch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["mla" if name == "flashmla_tail" else "gqa"]
    arguments = ready(name, Case("cold", **shape, dtype="bf16", page_size=64, query_lens=(5,) * 3, prefix_lens=(900,) * 3))
    without_scratch(monkeypatch)
    declines_capture(name, arguments, "scratch")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", [None, "packed"])
def test_flashinfer_repeated_in_other_orders_and_on_two_streams(shape: str, mask: str | None) -> None:
    case = Case(f"{shape} {mask}", **SHAPES[shape], **{**_BATCH, "page_size": 64}, mask=mask, lse=True)
    ready("flashinfer", case)
    for check in (check_repeat, check_order, check_streams):
        result = check("flashinfer", case, "cuda")
        assert result.outcome == "ok", f"{check.__name__}: {result}"


@pytest.mark.parametrize("shape", SHAPES)
def test_flashinfer_declines_under_capture(shape: str) -> None:
    arguments = ready("flashinfer", Case("host", **SHAPES[shape], dtype="bf16"))
    declines_capture("flashinfer", arguments, "capturing")


@pytest.mark.parametrize(("heads", "head_dim"), [(32, 128), (16, 256)])
def test_flashinfer_has_room_for_many_query_heads_a_kv_head(heads: int, head_dim: int) -> None:
    """Its partial results grow with them."""
    lens: dict[str, Any] = {"query_lens": (17,), "prefix_lens": (30000,)}
    case = Case("room", heads=heads, kv_heads=1, head_dim=head_dim, dtype="bf16", page_size=64, mask="packed", **lens)
    ready("flashinfer", case)
    result = check_case("flashinfer", case, "cuda")
    assert result.outcome == "ok", result
