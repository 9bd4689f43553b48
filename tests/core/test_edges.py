"""Values and strides at the edge of what is accepted: every implementation agrees with the arithmetic, or the call is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from mean_case import mean_case, near, rows

from flashmap.core import DeviceInfo, PagedKV, TreeMask, verify_attention
from flashmap.core.implementations.triton_shared.scratch import Scratch
from flashmap.core.implementations.triton_splitkv import launch
from flashmap.core.inputs import resolve
from flashmap.core.testing import Case, build, compare, expected

INF = float("inf")


def conforms(impl: str, case: Case, **changes: Any) -> None:
    arguments = {**build(case), **changes}
    wanted = expected(arguments)
    found = verify_attention(**arguments, impl=impl)
    out, lse = found if isinstance(found, tuple) else (found, None)
    result = compare(case, arguments, wanted, out, lse)
    assert result.outcome == "ok", str(result)


@pytest.mark.parametrize("draft", ["cache", "dense"])
@pytest.mark.parametrize("on_device", ["k_scale", "v_scale"])
def test_one_scale_on_the_device_and_one_a_number(impl: str, on_device: str, draft: str) -> None:
    scales: dict[str, Any] = {"k_scale": 0.5, "v_scale": 3.0}
    scales[on_device] = torch.tensor([scales[on_device]])
    conforms(impl, Case("mixed scales", draft=draft, lse=True), **scales)


@pytest.mark.parametrize(("k_scale", "v_scale"), [(0.0, -1.0), (-0.5, 0), (-2, 1)])
def test_scales_of_any_sign(impl: str, k_scale: float, v_scale: float) -> None:
    conforms(impl, Case("signs", lse=True), k_scale=k_scale, v_scale=v_scale)


def test_a_latent_cache_with_its_scale_on_the_device(impl: str) -> None:
    case = Case("latent", kv_heads=1, head_dim=40, v_head_dim=40, latent=True, lse=True)
    conforms(impl, case, k_scale=torch.tensor([[0.5]], dtype=torch.float64))


@pytest.mark.parametrize("prefix", [[], [2.0]])
def test_a_sink_of_minus_infinity_is_none(impl: str, prefix: list[float]) -> None:
    """Engines pad heads so. A row that sees nothing besides gives 0 and -inf."""
    arguments = mean_case([prefix], [[4]], draft="dense", window=0, positions=torch.tensor([1000 if prefix else 0]))
    out, lse = verify_attention(**arguments, sinks=torch.tensor([-INF]), return_lse=True, impl=impl)
    assert rows(out) == near([4]) and lse.tolist() == [[0.0]]
    arguments["kv"] = mean_case([prefix], [[]])["kv"]
    lost = {**arguments, "draft_kv": None, "kv": mean_case([[]], [[]])["kv"]}
    out, lse = verify_attention(**lost, sinks=torch.tensor([-INF]), return_lse=True, impl=impl)
    assert rows(out) == [0] and lse.tolist() == [[-INF]]


@pytest.mark.parametrize("window", [2**31, 2**63 - 1, 2**80])
def test_a_window_of_any_size(impl: str, window: int) -> None:
    positions = torch.zeros(9 + 3, dtype=torch.int64)  # before all that is listed
    conforms(impl, Case("wide", kv_start=True, lse=True), window=window, positions=positions)


@pytest.mark.parametrize("group", [3, 7, 12])
@pytest.mark.parametrize("dim", [1, 8, 40, 72, 160])
def test_groups_and_head_dimensions_that_are_no_powers_of_two(impl: str, group: int, dim: int) -> None:
    conforms(impl, Case("odd", heads=group, kv_heads=1, head_dim=dim, query_lens=(3,), prefix_lens=(20,), page_size=3, mask="packed"))


def test_the_result_has_no_gradient(impl: str) -> None:
    arguments = build(Case("grad"))
    arguments["q"].requires_grad_()
    out = verify_attention(**arguments, impl=impl)
    assert isinstance(out, torch.Tensor) and not out.requires_grad


@pytest.mark.parametrize("drafts", [[[3, 5]], [[3, 5], [7]]])
def test_without_any_prefix_nothing_is_divided_by_zero(drafts: list[list[float]]) -> None:
    """A GPU gives any number for it, and the splits are counted from it."""
    arguments = mean_case([[] for _ in drafts], drafts, draft="dense")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="divide by zero encountered in (floor_divide|fmod)")
        out = verify_attention(**arguments, impl="triton_splitkv")
    assert rows(out) == near([3, 4, *[7 for _ in drafts[1:]]])


def test_heads_that_lie_far_apart(impl: str, device: str) -> None:
    """Three heads, each 2^30 elements behind the one before."""
    apart, dim = 2**30, 32
    raw = torch.empty(2 * apart + 4 * dim, dtype=torch.uint8, device=device)
    pool = raw.view(torch.float8_e5m2).as_strided((4, 1, 3, dim), (dim, dim, apart, 1))
    for head in range(3):
        raw[head * apart : head * apart + 4 * dim] = torch.tensor(1.0 + head).to(torch.float8_e5m2).view(torch.uint8).to(device)
    ints = {"dtype": torch.int32, "device": device}
    kv = PagedKV(pool, pool, torch.tensor([[2, 3]], **ints), torch.tensor([2], **ints))  # type: ignore[arg-type]
    q = torch.zeros(1, 3, dim, dtype=torch.float16, device=device)
    out = verify_attention(q, kv, cu_seqlens_q=torch.tensor([0, 1], **ints), max_query_len=1, impl=impl)  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor) and out[0, :, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"out": torch.zeros(1, 1, 32).expand(2, -1, -1)}, r"out has strides \(0, 32, 1\): its rows share memory"),
        ({"q": torch.zeros(2, 0, 32), "out": None}, r"q must have at least one head, got shape \(2, 0, 32\)"),
    ],
)
def test_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        verify_attention(**{**mean_case([[1]], [[2, 3]]), **changes})


def test_numbers_may_be_numpys() -> None:
    numpy = pytest.importorskip("numpy")
    changes = {"max_query_len": numpy.int64(2), "window": numpy.int32(0), "scale": numpy.float32(0.5)}
    assert rows(verify_attention(**{**mean_case([[1]], [[2, 3]]), **changes})) == near([2, 3])


@pytest.mark.parametrize("latent", [False, True])
def test_a_request_longer_than_promised_spoils_no_other(latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths are on the device, so a wrong max_query_len goes unseen; what it costs is that request's own rows."""
    buffers = []

    def poisoned(self: Scratch, elements: int, *_: Any, **__: Any) -> torch.Tensor:
        buffers.append(torch.full((elements,), float("nan")))
        return buffers[-1]

    monkeypatch.setenv("FLASHMAP_SPLITKV_MIN_CHUNK", "16")
    monkeypatch.setattr(Scratch, "take", poisoned)
    lengths, keys, width = (2, 5), 256, 64
    cache = torch.randn(2 * keys, 1, 1, width)
    table = torch.arange(2 * keys, dtype=torch.int32).view(2, keys)
    kv = PagedKV(cache, None if latent else cache, table, torch.tensor([keys, keys]), v_head_dim=width if latent else None)
    q = torch.randn(sum(lengths), 1, width)
    call: dict[str, Any] = {"kv": kv, "cu_seqlens_q": torch.tensor([0, lengths[0], sum(lengths)])}
    wanted = verify_attention(q, **call, max_query_len=5, impl="reference")
    found = verify_attention(q, **call, max_query_len=2, impl="triton_splitkv")
    assert isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor)
    assert torch.allclose(found[: lengths[0]], wanted[: lengths[0]], atol=1e-5)
    rows_written = int((~buffers[0].isnan()).sum()) // (width + 1)  # a row and its LSE
    assert rows_written > 2 and rows_written % 2 == 0, "each split has a place for two rows and wrote both"


@pytest.mark.parametrize("latent", [False, True], ids=["gqa", "mla"])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_an_fp8_prefix_in_fp16(latent: bool, fp8: torch.dtype, size: float) -> None:
    """Whatever the size of a bf16 query, no row of it leaves fp16's range. (The mask hides all draft tokens, whose products stay bf16.)"""
    torch.manual_seed(0)
    heads, dim, v_dim, length = (1, 96, 64, 3) if latent else (2, 96, 48, 3)
    pages = torch.randn(9, 16, heads, dim).to(fp8)
    values = None if latent else torch.randn(9, 16, heads, v_dim).to(fp8)
    kv = PagedKV(
        pages,
        values,
        torch.randperm(9, dtype=torch.int32)[:8].view(2, 4),
        torch.tensor([61, 30], dtype=torch.int32),
        v_dim if latent else None,
    )
    q = (torch.randn(2 * length, 4, dim) * size).bfloat16()
    draft = torch.randn(2 * length, heads, dim).bfloat16()
    arguments: dict[str, Any] = dict(
        cu_seqlens_q=torch.tensor([0, length, 2 * length], dtype=torch.int32), max_query_len=length,
        draft_kv=(draft, None if latent else torch.randn(2 * length, heads, v_dim).bfloat16()),
        mask=TreeMask(torch.zeros(2 * length, 1, dtype=torch.int64), "packed"), scale=0.3 / size, return_lse=True,
    )  # fmt: skip
    call = resolve(q, kv, **arguments)
    assert launch._plan(call.request, DeviceInfo.of(q.device)).constants["PAIRS"]
    launch.run(call)  # verify_attention declines bf16 under the interpreter
    out, lse = call.out, call.lse
    wanted, wanted_lse = verify_attention(q, kv, **arguments, impl="reference")
    assert (out.float() - wanted.float()).abs().max() <= 2**-7 * wanted.float().abs().max()  # the interpreter cuts bf16 off
    assert (lse - wanted_lse).abs().max() <= 1e-2
