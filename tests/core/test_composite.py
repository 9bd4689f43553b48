"""fa3_tail, fa3 and flashmla_tail on a CPU: their kernels interpreted, the libraries replaced by doubles in torch.

A double takes what the library takes and insists on what the library insists on. Where the library's result means nothing, it
gives NaN and infinities.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import library

from flashmap.core import DeviceInfo, Limits, PagedKV, VerifyRequest, dispatch, registry
from flashmap.core.implementations import probing
from flashmap.core.implementations.composite import Composite, launch, libraries
from flashmap.core.implementations.composite.libraries import check_fa3, check_flashmla, search
from flashmap.core.implementations.probing import Found
from flashmap.core.implementations.triton_shared.scratch import Scratch
from flashmap.core.inputs import resolve
from flashmap.core.testing import Case, assert_conforms, build, cases, check_order, check_repeat

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the libraries themselves")
NAMES = ("fa3_tail", "fa3", "flashmla_tail")
H200 = replace(DeviceInfo.known("sm90"), triton="3.6.0")
GQA = VerifyRequest(32, 8, 128, 128, max_query_len=4, page_size=64, max_kv_len=8192)
MLA = VerifyRequest(16, 1, 576, 512, max_query_len=4, page_size=64, max_kv_len=8192, latent=True)


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    """(out [L, H, Dv], lse [H, L]) in fp32 of q [L, H, Dk] on keys and values [n, Hkv, D]; ``hidden`` bool [L, n]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    logits = (torch.einsum("thd,nhd->htn", q.float(), keys) * scale).masked_fill(hidden, float("-inf"))
    return torch.einsum("htn,nhd->thd", logits.softmax(-1), values), logits.logsumexp(-1)


def fa3_double(
    q: Any, k: Any, v: Any, q_v: Any, out: Any, cu_seqlens_q: Any, seqused_q: Any, seqused_k: Any, max_seqlen_q: int,
    max_seqlen_k: int, page_table: Any, leftpad_k: Any, softmax_scale: float, is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """FlashAttention 3's forward pass. Without ``leftpad_k`` it multiplies whole pages, as its TMA path does."""
    tokens, heads, _ = q.shape
    requests, page = page_table.shape[0], k.shape[1]
    for ints in (cu_seqlens_q, seqused_q, seqused_k, page_table, leftpad_k):
        assert ints is None or (ints.dtype == torch.int32 and ints.stride(-1) == 1)
    assert cu_seqlens_q.shape == (requests + 1,) and seqused_k.shape == (requests,)
    assert leftpad_k is None or not leftpad_k.any()
    for tensor in (q, k, v, q_v, out):  # moved by 16 bytes at a time
        assert tensor is None or (tensor.data_ptr() % 16 == 0 and not any(s * tensor.element_size() % 16 for s in tensor.stride()[:-1]))
    if out is None:
        out = torch.full((tokens, heads, v.shape[-1]), float("nan"), dtype=q.dtype)
    lse = torch.full((heads, tokens), float("nan"))
    for r, (first, end) in enumerate(zip(cu_seqlens_q.tolist()[:-1], cu_seqlens_q.tolist()[1:], strict=True)):
        length, rows = int(seqused_k[r]), end - first if seqused_q is None else int(seqused_q[r])
        assert 0 <= length <= max_seqlen_k <= page_table.shape[1] * page and rows <= max_seqlen_q
        at = slice(first, first + rows)
        if rows == 0:
            continue
        if length == 0:
            out[at], lse[:, at] = float("nan"), float("inf")
            continue
        listed = page_table[r, : -(-length // page)].long()
        read = len(listed) * page if leftpad_k is None else length
        keys, values = (x[listed].flatten(0, 1)[:read] for x in (k, v))
        query = q[at]
        if q_v is not None:
            query, keys = torch.cat((query, q_v[at]), -1), torch.cat((keys, values), -1)
        t, n = torch.arange(rows)[:, None], torch.arange(read)[None, :]
        hidden = (n >= length) | ((n > t + length - rows) if is_causal else (t < 0))
        result, lse[:, at] = attention(query, keys, values, hidden, softmax_scale)
        out[at] = result.to(out.dtype)
    return out, lse


def flashmla_double(
    q: Any, kcache: Any, head_size_v: int, seqlens_k: Any, block_table: Any, softmax_scale: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashMLA's dense decoding. A page id that does not exist is as a page of zeros."""
    requests, length, heads, dim = q.shape
    assert kcache.shape[1:] == (64, 1, 576) and (dim, head_size_v) == (576, 512) and not is_causal
    assert seqlens_k.dtype == block_table.dtype == torch.int32 and seqlens_k.shape == (requests,)
    assert q.is_contiguous() and q.data_ptr() % 16 == 0 and seqlens_k.min() >= 1
    out, lse = torch.empty(requests, length, heads, 512, dtype=q.dtype), torch.empty(requests, heads, length)
    for r, n in enumerate(seqlens_k.tolist()):
        assert n <= block_table.shape[1] * 64
        pages = [int(p) for p in block_table[r, : -(-n // 64)]]
        keys = torch.cat([kcache[p] if 0 <= p < len(kcache) else torch.zeros_like(kcache[0]) for p in pages])[:n]
        result, lse[r] = attention(q[r], keys, keys[..., :512], torch.zeros(length, n, dtype=torch.bool), softmax_scale)
        out[r] = result.to(out.dtype)
    return out, lse


DOUBLES = {"fa3_tail": fa3_double, "fa3": fa3_double, "flashmla_tail": flashmla_double}


def doubled(name: str, attend: Any = None) -> Composite:
    """The implementation on this CPU with its library's double."""
    real = registry.get(name)
    assert isinstance(real, Composite)
    capability = replace(real.capability, devices=frozenset({"cpu"}), dtypes=None, kv_dtypes=None)
    found = Found(attend or DOUBLES[name])
    return replace(real, capability=capability, find=lambda device: found)


def accepted(name: str, case: Case) -> bool:
    request = VerifyRequest.of(**build(case))
    return not doubled(name).why_not(request, DeviceInfo.of(torch.device("cpu")))


LATENT: dict[str, Any] = {"heads": 4, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "latent": True, "page_size": 64}
TREE: dict[str, Any] = {"query_lens": (5, 0, 8, 4), "prefix_lens": (37, 4, 0, 70)}
MORE = [
    Case("mla qlen", dtype="fp16", mask="qlen", slack=1, **LATENT, **TREE),
    Case("mla full", dtype="fp32", mask="full", kv_start=True, lse=True, **LATENT, **TREE),
    Case("mla packed", dtype="fp16", mask="packed", draft="dense", sinks=True, lse=True, **LATENT, **TREE),
    Case("mla slots", dtype="fp32", mask="packed", draft="slots", strided=True, int64=True, **LATENT, **TREE),
    Case("mla short", dtype="fp32", query_lens=(4, 4, 4, 3), prefix_lens=(-3, -4, -1, 9), lse=True, **LATENT),
    Case("mla short chain", dtype="fp16", query_lens=(4, 4, 4, 3), prefix_lens=(-3, -4, -1, 9), padded=2, **LATENT),
    Case("mla overlong", dtype="fp32", query_lens=(3, 2), prefix_lens=(125, 10), overlong=True, padded=1, **LATENT),
    Case("mla page 1", dtype="fp16", mask="packed", **{**LATENT, "page_size": 1}, **TREE),
    Case("int64", dtype="fp32", int64=True, strided=True, page_size=4, query_lens=(2, 0, 3, 4), prefix_lens=(33, 5, -2, 0), padded=2),
    Case("places", dtype="fp16", positions=True, kv_start=True, query_lens=(2, 3), prefix_lens=(33, 0)),
    Case("no table", dtype="fp32", query_lens=(0, 0), prefix_lens=(0, 0), padded=1),
    Case("many requests", dtype="fp32", mask="full", query_lens=(1, 2) * 70, prefix_lens=(3, 0) * 70),
]
GRID = [
    (name, case) for name in NAMES for case in (*cases("cpu", ("fp32", "fp16")), *MORE) if case.dtype != "bf16" and accepted(name, case)
]


@pytest.mark.parametrize(("name", "case"), GRID, ids=str)
def test_grid(name: str, case: Case) -> None:
    assert_conforms(doubled(name), case)


def test_the_grid_is_worth_running() -> None:
    """What each accepts of it: fa3 takes chains alone, FlashMLA latent caches with pages of 64."""
    counts = {name: sum(n == name for n, _ in GRID) for name in NAMES}
    assert counts["fa3_tail"] > 60 and counts["fa3"] > 20 and counts["flashmla_tail"] >= 8, counts


@pytest.mark.parametrize("name", ["fa3_tail", "flashmla_tail"])
def test_repeated_and_reordered(name: str) -> None:
    shape = LATENT if name == "flashmla_tail" else {}
    case = Case("order", query_lens=(2, 3, 1, 0), prefix_lens=(40, 0, 65, 5), mask="packed", lse=True, **shape)
    for check in (check_repeat, check_order):
        result = check(doubled(name), case)
        assert result.outcome == "ok", result


def test_an_output_that_the_library_cannot_write_is_written_by_the_tail() -> None:
    arguments = build(Case("odd out", dtype="fp16", query_lens=(3,), prefix_lens=(20,)))
    wide = torch.zeros(*arguments["out"].shape[:2], 65, dtype=torch.float16)
    wanted = resolve(**arguments)
    doubled("fa3_tail").run(wanted)
    odd = resolve(**{**arguments, "out": wide[..., :64]})
    for name in ("fa3", "fa3_tail"):
        odd.out.zero_()
        doubled(name).run(odd)
        torch.testing.assert_close(odd.out[:3], wanted.out[:3], rtol=2e-3, atol=2e-3)
        assert not wide[..., 64:].any() and not odd.out[3:].any()


def test_a_query_that_the_library_cannot_read_is_copied() -> None:
    arguments = build(Case("odd q", query_lens=(3,), prefix_lens=(20,)))
    wide = torch.zeros(*arguments["q"].shape[:2], 65)
    wide[..., :64] = arguments["q"]
    calls = [resolve(**{**arguments, "q": q, "out": arguments["out"].clone()}) for q in (arguments["q"], wide[..., :64])]
    for call in calls:
        doubled("fa3_tail").run(call)
    assert torch.equal(calls[0].out[:3], calls[1].out[:3])


@pytest.mark.parametrize("heads", [1, 2])
def test_an_unaligned_cache_is_declined(heads: int) -> None:
    case = Case("odd cache", heads=2, kv_heads=heads, query_lens=(3,), prefix_lens=(20,))
    arguments = build(case)
    kv = arguments["kv"]
    odd = torch.zeros(*kv.k.shape[:-1], 65)[..., :64]
    for k, v in ((odd, kv.v), (kv.k, odd)):
        request = VerifyRequest.of(**{**arguments, "kv": PagedKV(k, v, kv.block_table, kv.kv_lens)})
        for name in ("fa3_tail", "fa3"):
            reasons = doubled(name).why_not(request, DeviceInfo.of(torch.device("cpu")))
            assert [reason.code for reason in reasons] == ["alignment"]


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("name", NAMES)
def test_a_scale_that_turns_the_order_of_logits(name: str, scale: float) -> None:
    """Libraries take the largest logit before they scale it."""
    seen = []

    def attend(**arguments: Any) -> Any:
        seen.append(arguments["softmax_scale"])
        return DOUBLES[name](**arguments)

    shape = LATENT if name == "flashmla_tail" else {}
    assert_conforms(doubled(name, attend), Case("scale", query_lens=(3, 1), prefix_lens=(20, 9), scale=scale, **shape))
    assert seen == [0.5 if scale else 1.0]


def test_the_promise_of_finite_pages_lets_the_library_copy_them_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLASHMAP_FA3_FINITE_PAGES: right while the promise is kept, and NaN where it is not. By default it is not needed."""
    case = Case("pages", page_size=64, query_lens=(3,), prefix_lens=(70,))
    for value, finite in (("0", True), ("1", False)):
        monkeypatch.setenv("FLASHMAP_FA3_FINITE_PAGES", value)
        launch._plan.cache_clear()
        call = resolve(**build(case))
        doubled("fa3_tail").run(call)
        assert bool(call.out[:3].isfinite().all()) is finite
    arguments = build(case)
    for cache in (arguments["kv"].k, arguments["kv"].v):
        cache.nan_to_num_(0.5)
    call = resolve(**arguments)
    doubled("fa3_tail").run(call)
    assert call.out[:3].isfinite().all()
    launch._plan.cache_clear()


# -- what is declined -----------------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[str, VerifyRequest, DeviceInfo, list[str]]] = {
    "device": ("fa3_tail", GQA, DeviceInfo("cpu", "cpu", triton="3.6.0"), ["device"]),
    "other architectures": ("fa3", GQA, DeviceInfo.known("sm100"), ["capability"]),
    "older": ("flashmla_tail", MLA, DeviceInfo.known("sm80"), ["capability"]),
    "no triton": ("fa3_tail", GQA, replace(H200, triton=None), ["no_triton", "library"]),
    "fp32": ("fa3_tail", replace(GQA, dtype="fp32", kv_dtype="fp32"), H200, ["dtype", "kv_dtype", "library"]),
    "fp16 FlashMLA": ("flashmla_tail", replace(MLA, dtype="fp16", kv_dtype="fp16"), H200, ["dtype", "kv_dtype", "library"]),
    "fp8": ("fa3_tail", replace(GQA, kv_dtype="fp8_e4m3", scales="host"), H200, ["kv_dtype", "feature.fp8", "feature.scales", "library"]),
    "slots": ("fa3_tail", replace(GQA, kv_layout="slots", page_size=1, max_kv_len=None), H200, ["feature.slots", "library"]),
    "window": ("fa3_tail", replace(GQA, window=8), H200, ["feature.window", "library"]),
    "softcap": ("fa3_tail", replace(GQA, softcap=True), H200, ["feature.softcap", "library"]),
    "head dimension": ("fa3_tail", replace(GQA, head_dim=100, v_head_dim=100), H200, ["head_dim", "library"]),
    "head dimensions": ("fa3_tail", replace(GQA, head_dim=128, v_head_dim=64), H200, ["head_dim", "library"]),
    "latent": ("fa3", replace(MLA, head_dim=288, v_head_dim=256), H200, ["head_dim", "library"]),
    "tree": ("fa3", replace(GQA, mask="qlen"), H200, ["feature.tree", "library"]),
    "draft": ("fa3", replace(GQA, draft="dense", return_lse=True), H200, ["feature.draft_kv", "feature.lse", "library"]),
    "GQA on FlashMLA": ("flashmla_tail", GQA, H200, ["head_dim", "library"]),
    "pages": ("flashmla_tail", replace(MLA, page_size=16), H200, ["page_size", "library"]),
    "no GPU here": ("fa3_tail", GQA, H200, ["library"]),
    "alignment": ("fa3_tail", replace(GQA, aligned=False), H200, ["alignment", "library"]),
    "captured": ("fa3_tail", GQA, replace(H200, capturing=True), ["library"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_declined(way: str) -> None:
    name, request, device, codes = WAYS[way]
    reasons = registry.get(name).why_not(request, device)
    assert [reason.code for reason in reasons] == codes
    assert all(reason.text for reason in reasons)


@pytest.mark.parametrize(("name", "request_"), [("fa3_tail", GQA), ("fa3", MLA), ("flashmla_tail", MLA)])
def test_served_once_the_library_is_found(name: str, request_: VerifyRequest) -> None:
    found = replace(registry.get(name), find=lambda device: Found(DOUBLES[name]))  # type: ignore[type-var]
    for device in (H200, replace(H200, capturing=True)):
        assert found.why_not(request_, device) == ()
    for head_dim in (64, 80, 96, 128, 192, 256) if name == "fa3_tail" else ():
        assert found.why_not(replace(request_, head_dim=head_dim, v_head_dim=head_dim, mask="full", page_size=1), H200) == ()


def test_asking_loads_nothing() -> None:
    code = (
        "import sys; from flashmap.core import DeviceInfo, VerifyRequest, registry\n"
        "for name in ('fa3_tail', 'fa3', 'flashmla_tail'):\n"
        "    for arch in ('sm90', 'sm100'):\n"
        "        assert registry.get(name).why_not(VerifyRequest(32, 8, 128, 128), DeviceInfo.known(arch))\n"
        "print(*[m for m in sys.modules if m.split('.')[0] in ('triton', 'vllm', 'sgl_kernel')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


# -- before a capture -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Scratch:
    """Scratch that no call has used."""
    scratch = Scratch(torch.device("cpu"))
    monkeypatch.setattr(launch.scratch, "scratch_of", lambda device: scratch)
    return scratch


def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DeviceInfo.of(torch.device("cpu"))
    monkeypatch.setattr(DeviceInfo, "of", lambda device: replace(real, capturing=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_needs_scratch_which_prepare_reserves(name: str, fresh: Scratch, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("captured", query_lens=(3, 2), prefix_lens=(70, 3), **(LATENT if name == "flashmla_tail" else {}))
    implementation, arguments = doubled(name), build(case)
    call = resolve(**arguments)
    assert [reason.code for reason in implementation.not_ready(call)] == ["scratch"]
    implementation.prepare(call.request, Limits(40, 3, 128), torch.device("cpu"))
    assert implementation.not_ready(call) == ()
    allocated = fresh.bytes()
    capturing(monkeypatch)
    assert_conforms(implementation, case)
    assert fresh.bytes() == allocated


def test_a_capture_before_the_library_was_tried_takes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was decided then does not stand once the library is found."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: libraries.HOPPER)
    monkeypatch.setattr(probing, "_found", {})
    device = DeviceInfo.known("sm90", capturing=True)
    (reason,) = libraries.fa3(device).reasons
    assert reason.code == "not_probed"
    request, policy = resolve(**build(Case("cold", dtype="bf16"))).request, dispatch.Policy()
    monkeypatch.setattr(dispatch, "preference", lambda *_: ("fa3_tail", "triton_splitkv"))
    assert dispatch.decide(request, device, policy).winner == "triton_splitkv"
    probing._found["FlashAttention 3"] = Found(fa3_double)
    assert dispatch.decide(request, device, policy).winner == "fa3_tail"


def test_the_library_is_called_in_prepare_as_it_will_be(fresh: Scratch) -> None:
    """FlashAttention 3 chooses its kernels by the width of the table, the number of requests in steps of 31 and the query length."""
    seen = []

    def attend(**arguments: Any) -> Any:
        seen.append((arguments["page_table"].shape[0], arguments["max_seqlen_k"], arguments["max_seqlen_q"]))
        return fa3_double(**arguments)

    request = VerifyRequest.of(**build(Case("prepared", query_lens=(3, 2), prefix_lens=(70, 3))))
    doubled("fa3_tail", attend).prepare(request, Limits(70, 3, 1000), torch.device("cpu"))
    assert seen == [(1, 1008, 3), (32, 1008, 3), (63, 1008, 3), (70, 1008, 3)]


# -- finding a library ----------------------------------------------------------------------------------------------------

SCHEMA = (
    "(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, "
    "Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, "
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
    "int sm_margin{more}) -> Tensor[]"
)
VLLM = ", Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k"
SGL = ", int attention_chunk, Tensor? sinks, Tensor? sparse_mask_fine, bool only_qv"


@pytest.fixture
def define() -> Iterator[Any]:
    """define(operator, schema, function): an operator of torch in a namespace of ours; gives the source that names it."""
    defined = library.Library("flashmap_test", "FRAGMENT")

    def make(operator: str, schema: str, function: Any) -> libraries._Source:
        defined.define(operator + schema)
        defined.impl(operator, function, "CPU")
        return replace(libraries._FA3[0], namespace="flashmap_test", operator=operator)

    yield make
    defined._destroy()


def as_operator(attend: Any) -> Any:
    """fa3_double with all of the operator's parameters."""

    def fwd(*given: Any) -> list[torch.Tensor]:
        names = [part.split()[-1] for part in SCHEMA.split("(")[1].split("{")[0].split(", ")]
        call = dict(zip(names, given, strict=False))
        assert (call["window_size_left"], call["window_size_right"], call["softcap"], call["num_splits"]) == (-1, -1, 0.0, 0)
        assert call["k_new"] is None and call["scheduler_metadata"] is None
        out, lse = attend(**{name: call[name] for name in libraries.FA3_PARAMETERS})
        return [out.clone() if out is call["out"] else out, lse]  # torch wants no result to be an argument of a Python operator

    return fwd


@pytest.mark.parametrize("more", ["", VLLM, SGL, ", float unknown=2.0"])
def test_found_whatever_else_it_takes(define: Any, more: str) -> None:
    found = search((define("fwd", SCHEMA.format(more=more), as_operator(fa3_double)),), check_fa3, torch.device("cpu"))
    assert found.attend is not None and found.reasons == ()
    call = resolve(**build(Case("gradient", query_lens=(3,), prefix_lens=(20,))))
    call.q.requires_grad_()
    doubled("fa3_tail", found.attend).run(call)
    assert not call.out.requires_grad


def wrong(change: Any) -> Any:
    def attend(**arguments: Any) -> Any:
        return change(arguments)

    return attend


def ignoring(name: str) -> Any:
    """A library that takes an argument and does not look at it."""
    return wrong(lambda arguments: fa3_double(**{**arguments, name: None}))


def base_two(arguments: dict[str, Any]) -> Any:
    out, lse = fa3_double(**arguments)
    return out, lse / 0.6931471805599453


def fails(arguments: dict[str, Any]) -> Any:
    raise RuntimeError("no kernel image\nis available")


WRONG = {
    "whole pages": (ignoring("leftpad_k"), "nan"),
    "seqused_q": (ignoring("seqused_q"), "seqused_q 0"),
    "latent query": (ignoring("q_v"), "MLA"),
    "log base": (wrong(base_two), "log-sum-exp"),
    "not causal": (wrong(lambda arguments: fa3_double(**{**arguments, "is_causal": False})), "causal"),
    "raises": (wrong(fails), "RuntimeError: no kernel image"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_library_that_errs_is_not_used(define: Any, kind: str) -> None:
    attend, text = WRONG[kind]
    found = search((define("fwd", SCHEMA.format(more=VLLM), as_operator(attend)),), check_fa3, torch.device("cpu"))
    assert found.attend is None and [reason.code for reason in found.reasons] == ["library_probe"]
    assert text in found.reasons[0].text


def test_a_library_with_other_parameters_is_not_used(define: Any) -> None:
    schemas = {
        "less": SCHEMA.format(more="").replace("Tensor? leftpad_k, ", ""),
        "more": SCHEMA.format(more=", Tensor block_mask"),
    }
    sources = tuple(define(name, schema, as_operator(fa3_double)) for name, schema in schemas.items())
    found = search(sources, check_fa3, torch.device("cpu"))
    assert found.attend is None and [reason.code for reason in found.reasons] == ["library_parameters"] * 2
    assert "leftpad_k" in found.reasons[0].text and "block_mask" in found.reasons[1].text


def test_the_next_source_is_tried(define: Any, caplog: pytest.LogCaptureFixture) -> None:
    sources = (
        replace(libraries._FA3[0], package="no_such_package", namespace="flashmap_test_nothing"),
        define("bad", SCHEMA.format(more=""), as_operator(wrong(fails))),
        define("good", SCHEMA.format(more=""), as_operator(fa3_double)),
    )
    with caplog.at_level("INFO", logger="flashmap"):
        assert search(sources, check_fa3, torch.device("cpu")).attend is not None
    assert len(caplog.records) == 1
    assert [reason.code for reason in search(sources[:2], check_fa3, torch.device("cpu")).reasons] == ["library", "library_probe"]


def test_a_file_that_does_not_load_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "flashmap_test_engine"
    (package / "vllm_flash_attn").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('an engine is not imported')")
    (package / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so").write_text("no library")
    monkeypatch.syspath_prepend(tmp_path)
    source = replace(libraries._FA3[0], package="flashmap_test_engine", namespace="flashmap_test_nothing")
    (reason,) = search((source,), check_fa3, torch.device("cpu")).reasons
    assert reason.code == "library_probe" and "_vllm_fa3_C.abi3.so" in reason.text


def test_flashmla_is_tried_too() -> None:
    cpu = torch.device("cpu")
    assert check_flashmla(flashmla_double, cpu) is None

    def half(**arguments: Any) -> Any:
        out, lse = flashmla_double(**arguments)
        return out / 2, lse

    assert "out is off" in str(check_flashmla(half, cpu))


def test_looked_for_once_and_never_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(probing, "_found", {})
    monkeypatch.setattr(libraries, "search", lambda *arguments: looked.append(arguments) or Found(fa3_double))
    assert [reason.code for reason in libraries.fa3(replace(H200, capturing=True)).reasons] == ["not_probed"] and not looked
    assert libraries.fa3(H200).attend is fa3_double
    assert libraries.fa3(replace(H200, capturing=True)).attend is fa3_double and len(looked) == 1
    monkeypatch.setattr(probing, "_found", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert [reason.code for reason in libraries.fa3(H200).reasons] == ["library"] and len(looked) == 1
