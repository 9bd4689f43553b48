"""fa3_tail, fa3 and flashmla_tail on a CPU: which calls they serve and what they compute.

Their kernels are interpreted, the libraries replaced by the doubles of composite_doubles.py. test_composite_libraries.py has how a
library is found.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from composite_doubles import DOUBLES, doubled, fa3_double

from flashmap.core import DeviceInfo, Limits, PagedKV, VerifyRequest, dispatch, registry
from flashmap.core.implementations.composite import launch, libraries
from flashmap.core.implementations.probing import Found
from flashmap.core.implementations.triton_shared.scratch import Scratch
from flashmap.core.inputs import resolve
from flashmap.core.testing import Case, assert_conforms, build, cases, check_order, check_repeat

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the libraries themselves")
NAMES = ("fa3_tail", "fa3", "flashmla_tail")
H200 = replace(DeviceInfo.known("sm90"), triton="3.6.0")
GQA = VerifyRequest(32, 8, 128, 128, max_query_len=4, page_size=64, max_kv_len=8192)
MLA = VerifyRequest(16, 1, 576, 512, max_query_len=4, page_size=64, max_kv_len=8192, latent=True)


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


def test_a_capture_before_the_library_was_tried_takes_another(pretend_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was decided then does not stand once the library is found."""
    found = pretend_gpu(libraries.HOPPER)
    device = DeviceInfo.known("sm90", capturing=True)
    (reason,) = libraries.fa3(device).reasons
    assert reason.code == "not_probed"
    request, policy = resolve(**build(Case("cold", dtype="bf16"))).request, dispatch.Policy()
    monkeypatch.setattr(dispatch, "preference", lambda *_: ("fa3_tail", "triton_splitkv"))
    assert dispatch.decide(request, device, policy).winner == "triton_splitkv"
    found["FlashAttention 3"] = Found(fa3_double)
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
