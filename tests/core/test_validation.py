"""Bad input: the error's type, that it names the argument and what is accepted, and that nothing was launched or changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashmap.core import Declined, Limits, PagedKV, SlotKV, TreeMask, VerifyRequest, prepare, stats, verify_attention

META = torch.device("meta")  # stands for another device
Arguments = dict[str, Any]


def paged(**changes: Any) -> PagedKV:
    fields = {
        "k": torch.zeros(6, 4, 2, 16),
        "v": torch.zeros(6, 4, 2, 16),
        "block_table": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        "kv_lens": torch.tensor([5, 8], dtype=torch.int32),
    }
    return PagedKV(**{**fields, **changes})


def slots(**changes: Any) -> SlotKV:
    fields = {"k": torch.zeros(24, 2, 16), "v": torch.zeros(24, 2, 16), "indptr": torch.tensor([0, 5, 9]), "indices": torch.arange(12)}
    return SlotKV(**{**fields, **changes})


def latent() -> PagedKV:
    return paged(k=torch.zeros(6, 4, 1, 16), v=None, v_head_dim=8)


def good() -> Arguments:
    return {
        "q": torch.zeros(5, 4, 16),
        "kv": paged(),
        "cu_seqlens_q": torch.tensor([0, 2, 5]),
        "max_query_len": 3,
        "out": torch.full((5, 4, 16), 77.0),
    }


def packed(**changes: Any) -> TreeMask:
    return TreeMask(**{"data": torch.zeros(5, 1, dtype=torch.int64), "layout": "packed", **changes})


def qlen(data: torch.Tensor, indptr: torch.Tensor | None = None) -> TreeMask:
    return TreeMask(data, "qlen", indptr)


def full(size: int = 40, indptr: torch.Tensor | None = None) -> TreeMask:
    return TreeMask(torch.zeros(size, dtype=torch.bool), "full", indptr)


# name: (what is built, the error, what its text says)
OBJECTS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "k is no tensor": (lambda: paged(k=[1]), TypeError, r"k must be a tensor \[pages, page_size, Hkv, Dk\], got list"),
    "k has three dimensions": (lambda: paged(k=torch.zeros(24, 2, 16)), ValueError, r"k must be \[pages, page_size, Hkv, Dk\], got shape \(24, 2, 16\)"),
    "k has four dimensions": (lambda: slots(k=torch.zeros(6, 4, 2, 16)), ValueError, r"k must be \[slots, Hkv, Dk\]"),
    "k is int": (lambda: paged(k=torch.zeros(6, 4, 2, 16, dtype=torch.int32)), TypeError, "k has dtype torch.int32, accepted: torch.float32"),
    "k is float64": (lambda: paged(k=torch.zeros(6, 4, 2, 16).double()), TypeError, "k has dtype torch.float64"),
    "k is transposed": (lambda: paged(k=torch.zeros(6, 4, 16, 2).mT), ValueError, "k must be contiguous in its last dimension, got strides"),
    "pages of nothing": (lambda: paged(k=torch.zeros(6, 0, 2, 16), v=torch.zeros(6, 0, 2, 16)), ValueError, "k must have a page_size of at least 1"),
    "no KV heads": (lambda: paged(k=torch.zeros(6, 4, 0, 16)), ValueError, "k must have at least one KV head"),
    "v differs in dtype": (lambda: paged(v=torch.zeros(6, 4, 2, 16).half()), TypeError, "v has dtype torch.float16, accepted: torch.float32"),
    "v differs in heads": (lambda: paged(v=torch.zeros(6, 4, 1, 16)), ValueError, r"v has shape \(6, 4, 1, 16\), k \(6, 4, 2, 16\)"),
    "v is elsewhere": (lambda: paged(v=torch.zeros(6, 4, 2, 16, device=META)), ValueError, "v is on meta, the other tensors are on cpu"),
    "v and v_head_dim differ": (lambda: paged(v_head_dim=8), ValueError, "v_head_dim is 8, v has 16 columns"),
    "no v and no v_head_dim": (lambda: paged(v=None, k=torch.zeros(6, 4, 1, 16)), ValueError, "v_head_dim is not given"),
    "v_head_dim too large": (lambda: paged(v=None, k=torch.zeros(6, 4, 1, 16), v_head_dim=17), ValueError, "v_head_dim must be an integer from 1 to k's 16"),
    "v_head_dim is a float": (lambda: paged(v=None, k=torch.zeros(6, 4, 1, 16), v_head_dim=8.0), ValueError, "v_head_dim must be an integer"),
    "latent with two heads": (lambda: paged(v=None, v_head_dim=8), ValueError, "has one KV head, k has 2"),
    "block_table is int64": (lambda: paged(block_table=torch.zeros(2, 2, dtype=torch.int64)), TypeError, "block_table has dtype torch.int64, accepted: torch.int32"),
    "block_table is flat": (lambda: paged(block_table=torch.zeros(4, dtype=torch.int32)), ValueError, r"block_table must be \[R, W\]"),
    "block_table is elsewhere": (lambda: paged(block_table=torch.zeros(2, 2, dtype=torch.int32, device=META)), ValueError, "block_table is on meta"),
    "kv_lens is float": (lambda: paged(kv_lens=torch.zeros(2)), TypeError, "kv_lens has dtype torch.float32, accepted: torch.int32, torch.int64"),
    "kv_lens has too many": (lambda: paged(kv_lens=torch.zeros(3, dtype=torch.int32)), ValueError, "kv_lens has 3 entries, block_table 2 rows"),
    "kv_start has too few": (lambda: paged(kv_start=torch.zeros(1, dtype=torch.int64)), ValueError, "kv_start has 1 entries, it needs one for each of the 2"),
    "kv_start is float": (lambda: slots(kv_start=torch.zeros(2)), TypeError, "kv_start has dtype torch.float32"),
    "indptr is empty": (lambda: slots(indptr=torch.zeros(0, dtype=torch.int32)), ValueError, "indptr is empty"),
    "indptr is int16": (lambda: slots(indptr=torch.zeros(3, dtype=torch.int16)), TypeError, "indptr has dtype torch.int16"),
    "indices are 2-D": (lambda: slots(indices=torch.zeros(2, 6, dtype=torch.int32)), ValueError, "indices must be"),
    "mask layout": (lambda: TreeMask(torch.zeros(4, dtype=torch.bool), "bits"), ValueError, "layout must be 'full', 'qlen' or 'packed', got 'bits'"),
    "mask bytes are int32": (lambda: TreeMask(torch.zeros(4, dtype=torch.int32), "full"), TypeError, "data has dtype torch.int32, accepted: torch.bool, torch.uint8"),
    "mask bits are int32": (lambda: packed(data=torch.zeros(5, 1, dtype=torch.int32)), TypeError, "data has dtype torch.int32, accepted: torch.int64"),
    "packed is flat": (lambda: packed(data=torch.zeros(5, dtype=torch.int64)), ValueError, r"data must be \[T, words\]"),
    "packed with indptr": (lambda: packed(indptr=torch.tensor([0, 1])), ValueError, "indptr does not go with layout 'packed'"),
    "full in 3-D": (lambda: TreeMask(torch.zeros(2, 3, 3, dtype=torch.bool), "full"), ValueError, "data must be flat"),
    "qlen in 3-D, cut": (lambda: qlen(torch.zeros(2, 3, 4, dtype=torch.bool)[..., :3]), ValueError, "data of shape .* must be contiguous"),
    "mask is no tensor": (lambda: TreeMask([[1]], "qlen"), TypeError, "data must be a tensor"),  # type: ignore[arg-type]
    "mask indptr is float": (lambda: full(indptr=torch.zeros(2)), TypeError, "indptr has dtype torch.float32"),
    "limits": (lambda: Limits(0, 1, 1), ValueError, "max_requests must be an integer >= 1, got 0"),
    "limits of a float": (lambda: Limits(1, 1, 1e5), ValueError, "max_kv_len must be an integer >= 1, got 100000.0"),  # type: ignore[arg-type]
}  # fmt: skip

# name: (arguments that replace those of good(), the error, what its text says)
CALLS: dict[str, tuple[Callable[[], Arguments], type[Exception], str]] = {
    "kv": (lambda: {"kv": (1, 2)}, TypeError, "kv must be a PagedKV or a SlotKV, got tuple"),
    "q is 2-D": (lambda: {"q": torch.zeros(5, 64)}, ValueError, r"q must be \[T, Hq, Dk\], got shape \(5, 64\)"),
    "q is float64": (lambda: {"q": torch.zeros(5, 4, 16).double()}, TypeError, "q has dtype torch.float64, accepted: torch.float32, torch.float16, torch.bfloat16"),
    "q is fp8": (lambda: {"q": torch.zeros(5, 4, 16).to(torch.float8_e4m3fn)}, TypeError, "q has dtype torch.float8_e4m3fn"),
    "q's head dimension": (lambda: {"q": torch.zeros(5, 4, 32)}, ValueError, "q has head dimension 32, the cache's k has 16"),
    "q's heads": (lambda: {"q": torch.zeros(5, 3, 16)}, ValueError, "q has 3 heads, which is no multiple of the cache's 2 KV heads"),
    "q is elsewhere": (lambda: {"q": torch.zeros(5, 4, 16, device=META)}, ValueError, "q is on meta"),
    "q's dtype is not the cache's": (lambda: {"q": torch.zeros(5, 4, 16).half()}, TypeError, "the cache is torch.float32, q is torch.float16"),
    "cu_seqlens_q is a list": (lambda: {"cu_seqlens_q": [0, 2, 5]}, TypeError, "cu_seqlens_q must be a tensor"),
    "cu_seqlens_q is float": (lambda: {"cu_seqlens_q": torch.zeros(3)}, TypeError, "cu_seqlens_q has dtype torch.float32"),
    "cu_seqlens_q is short": (lambda: {"cu_seqlens_q": torch.tensor([0, 5])}, ValueError, "cu_seqlens_q has 2 entries, kv lists 2 requests: it needs 3"),
    "max_query_len is a tensor": (lambda: {"max_query_len": torch.tensor(3)}, TypeError, "max_query_len must be an integer on the host, got Tensor"),
    "max_query_len is negative": (lambda: {"max_query_len": -1}, ValueError, "max_query_len must be 0 or more, got -1"),
    "max_query_len is True": (lambda: {"max_query_len": True}, TypeError, "max_query_len must be an integer"),
    "both places of the drafts": (
        lambda: {"draft_kv": (torch.zeros(5, 2, 16),) * 2, "draft_slots": torch.zeros(5, dtype=torch.int32)},
        ValueError, "draft_kv and draft_slots are both given",
    ),
    "draft_kv is a tensor": (lambda: {"draft_kv": torch.zeros(2, 5, 2, 16)}, TypeError, r"draft_kv must be a pair \(k, v\), got Tensor"),
    "draft_kv has three": (lambda: {"draft_kv": (torch.zeros(5, 2, 16),) * 3}, TypeError, "draft_kv must be a pair"),
    "draft_kv without v": (lambda: {"draft_kv": (torch.zeros(5, 2, 16), None)}, ValueError, "draft_kv's v is None, which only a latent cache"),
    "draft_kv without k": (lambda: {"draft_kv": (None, torch.zeros(5, 2, 16))}, TypeError, "draft_kv's k must be a tensor"),
    "draft k's shape": (lambda: {"draft_kv": (torch.zeros(4, 2, 16), torch.zeros(5, 2, 16))}, ValueError, r"draft_kv's k has shape \(4, 2, 16\)"),
    "draft v's dtype": (lambda: {"draft_kv": (torch.zeros(5, 2, 16), torch.zeros(5, 2, 16).half())}, TypeError, "draft_kv's v has dtype torch.float16"),
    "draft_slots is float": (lambda: {"draft_slots": torch.zeros(5)}, TypeError, "draft_slots has dtype torch.float32"),
    "draft_slots is short": (lambda: {"draft_slots": torch.zeros(4, dtype=torch.int64)}, ValueError, "draft_slots has 4 entries, q has 5 rows"),
    "positions is float": (lambda: {"positions": torch.zeros(5)}, TypeError, "positions has dtype torch.float32"),
    "positions is long": (lambda: {"positions": torch.zeros(6, dtype=torch.int64)}, ValueError, "positions has 6 entries, q has 5 rows"),
    "window is negative": (lambda: {"window": -1}, ValueError, "window must be 0 or more, got -1"),
    "window is a float": (lambda: {"window": 4.0}, TypeError, "window must be an integer on the host, got float"),
    "window with a tree": (lambda: {"window": 4, "mask": packed()}, ValueError, "window with a TreeMask needs positions"),
    "mask is a tensor": (lambda: {"mask": torch.zeros(5, 5)}, TypeError, "mask must be a TreeMask or None"),
    "mask is elsewhere": (lambda: {"mask": packed(data=torch.zeros(5, 1, dtype=torch.int64, device=META))}, ValueError, "mask's data is on meta"),
    "mask's rows": (lambda: {"mask": packed(data=torch.zeros(4, 1, dtype=torch.int64))}, ValueError, "mask's data has 4 entries, q has 5 rows"),
    "mask's words": (
        lambda: {"mask": packed(), "max_query_len": 65}, ValueError, "mask's data has 1 words a row, max_query_len 65 needs 2",
    ),
    "mask's indptr": (lambda: {"mask": full(indptr=torch.tensor([0]))}, ValueError, "mask's indptr has 1 entries, it needs 2 or 3"),
    "qlen is short": (lambda: {"mask": qlen(torch.zeros(17, dtype=torch.bool))}, ValueError, r"mask's data has 17 entries, it needs R \* max_query_len\*\*2 = 18"),
    "qlen in 3-D is narrow": (lambda: {"mask": qlen(torch.zeros(2, 2, 2, dtype=torch.bool))}, ValueError, r"mask's data has shape \(2, 2, 2\)"),
    "qlen in 3-D has too few": (lambda: {"mask": qlen(torch.zeros(1, 3, 3, dtype=torch.bool))}, ValueError, r"it needs \[R, L, L\] = \(2, 3, 3\)"),
    "sinks are int": (lambda: {"sinks": torch.zeros(4, dtype=torch.int32)}, TypeError, "sinks has dtype torch.int32"),
    "sinks per KV head": (lambda: {"sinks": torch.zeros(2)}, ValueError, "sinks has 2 entries, q has 4 heads"),
    "sinks is a list": (lambda: {"sinks": [0.0] * 4}, TypeError, "sinks must be a tensor"),
    "scale is a tensor": (lambda: {"scale": torch.tensor(0.5)}, TypeError, "scale must be a float, got Tensor"),
    "scale is nan": (lambda: {"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    "softcap is negative": (lambda: {"softcap": -30.0}, ValueError, "softcap must be 0 .* or more, got -30.0"),
    "softcap is None": (lambda: {"softcap": None}, TypeError, "softcap must be a float, got NoneType"),
    "k_scale per head": (lambda: {"k_scale": torch.ones(2)}, ValueError, "k_scale must be a float or a floating tensor of one element"),
    "k_scale is int": (lambda: {"k_scale": torch.ones(1, dtype=torch.int32)}, ValueError, "k_scale must be a float"),
    "v_scale is text": (lambda: {"v_scale": "1.0"}, TypeError, "v_scale must be a float, got str"),
    "v_scale is infinite": (lambda: {"v_scale": float("inf")}, ValueError, "v_scale must be finite"),
    "v_scale is elsewhere": (lambda: {"v_scale": torch.ones(1, device=META)}, ValueError, "v_scale is on meta"),
    "v_scale of a latent cache": (
        lambda: {"kv": latent(), "out": None, "v_scale": 0.5}, ValueError, "v_scale must be 1.0 for a latent cache, .* got 0.5",
    ),
    "v_scale tensor of a latent cache": (lambda: {"kv": latent(), "out": None, "v_scale": torch.ones(1)}, ValueError, "v_scale must be 1.0"),
    "out's shape": (lambda: {"out": torch.full((5, 4, 8), 77.0)}, ValueError, r"out has shape \(5, 4, 8\), it needs \[T, Hq, Dv\] = \(5, 4, 16\)"),
    "out's dtype": (lambda: {"out": torch.full((5, 4, 16), 77.0).half()}, TypeError, "out has dtype torch.float16, accepted: torch.float32"),
    "out is transposed": (lambda: {"out": torch.full((5, 16, 4), 77.0).mT}, ValueError, "out must be contiguous in its last dimension"),
    "impl": (lambda: {"impl": "tritton"}, ValueError, "no implementation is named 'tritton': registered are reference, torch_dense, triton_splitkv"),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_what_one_object_can_know_is_checked_in_its_constructor(name: str) -> None:
    make, error, text = OBJECTS[name]
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("name", CALLS)
def test_the_rest_is_checked_in_the_call(name: str) -> None:
    make, error, text = CALLS[name]
    arguments = {**good(), **make()}
    with pytest.raises(error, match=text) as caught:
        verify_attention(**arguments)
    assert not isinstance(caught.value, Declined)
    out = arguments["out"]
    assert out is None or (out == 77).all()
    assert stats.snapshot() == {}, "nothing was launched"


@pytest.mark.parametrize("name", [name for name in CALLS if name != "impl"])
def test_a_request_is_validated_as_the_call(name: str) -> None:
    make, error, text = CALLS[name]
    with pytest.raises(error, match=text):
        VerifyRequest.of(**{**good(), **make()})


def test_what_is_accepted() -> None:
    """The near side of each border above."""
    q8 = torch.zeros(6, 4, 2, 16).to(torch.float8_e5m2)
    accepted: list[Arguments] = [
        {},
        {"kv": slots()},
        {"kv": paged(k=q8, v=q8)},
        {"kv": latent(), "q": torch.zeros(5, 4, 16), "out": None, "k_scale": 0.5},
        {"kv": paged(v=torch.zeros(6, 4, 2, 8)), "out": None},
        {"draft_kv": [torch.zeros(5, 2, 16), torch.zeros(5, 2, 16)]},
        {"draft_slots": torch.zeros(5, dtype=torch.int64)},
        {"window": 0},
        {"window": 4, "mask": packed(), "positions": torch.zeros(5, dtype=torch.int32)},
        {"mask": packed(data=torch.zeros(5, 3, dtype=torch.int64))},
        {"mask": full(40), "max_query_len": 64},
        {"mask": full(40, torch.tensor([0, 14], dtype=torch.int32))},
        {"mask": full(40, torch.tensor([0, 14, 40]))},
        {"mask": qlen(torch.zeros(18, dtype=torch.int8))},
        {"mask": qlen(torch.zeros(13, dtype=torch.uint8), torch.tensor([0, 4]))},
        {"mask": qlen(torch.zeros(9, 3, 3, dtype=torch.bool))},
        {"sinks": torch.zeros(4, dtype=torch.bfloat16), "softcap": 30, "scale": 1},
        {"k_scale": torch.ones(()), "v_scale": torch.ones(1, 1, dtype=torch.float64)},
    ]
    for changes in accepted:
        verify_attention(**{**good(), **changes})
    assert stats.snapshot() == {("torch_dense", "run", ""): len(accepted)}


def test_prepare_names_what_it_prepared_and_refuses_unknown_names() -> None:
    request = VerifyRequest.of(**good())
    assert prepare(request, Limits(4, 8, 1024), device="cpu") == "torch_dense"
    with pytest.raises(ValueError, match="no implementation is named 'tritton'"):
        prepare(request, Limits(4, 8, 1024), device="cpu", impl="tritton")
