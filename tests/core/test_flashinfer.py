"""flashinfer on a CPU, with FlashInfer's wrappers replaced by doubles in torch.

A double has the wrapper's signatures (FlashInfer 0.6.14), insists on what FlashInfer insists on, and does as it does: a mask is
packed by segments of bytes, the log-sum-exp is in base 2, a row whose keys are all masked gets their mean.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from flashmap.core import DeviceInfo, Limits, PagedKV, VerifyRequest, dispatch, registry
from flashmap.core.implementations import flashinfer
from flashmap.core.implementations.flashinfer import FlashInfer, Latent, Paged, look
from flashmap.core.implementations.probing import Attend, Found
from flashmap.core.inputs import resolve
from flashmap.core.testing import Case, assert_conforms, build, cases, check_order, check_repeat

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs FlashInfer itself")
CPU = torch.device("cpu")
H200 = DeviceInfo.known("sm90")
GQA = VerifyRequest(32, 8, 128, 128, max_query_len=4, page_size=64, max_kv_len=8192)
MLA = VerifyRequest(16, 1, 576, 512, max_query_len=4, page_size=64, max_kv_len=8192, latent=True)
MASKED = -5e4  # what FlashInfer has for minus infinity, before the scale


def softmax(logits: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [L, H, D], log-sum-exp in base 2 [L, H]) of logits [H, L, n] on values [n, H, D]."""
    return torch.einsum("htn,nhd->thd", logits.softmax(-1), values), logits.logsumexp(-1).T / np.log(2)


def listed(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """fp32 [length, ...] of a cache [pages, page_size, ...]: no row behind ``length`` is read."""
    return cache[pages.long()].flatten(0, 1)[:length].float()


class PagedDouble:
    """BatchPrefillWithPagedKVCacheWrapper. ``made``: all that were."""

    made: ClassVar[list[PagedDouble]] = []

    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD", use_cuda_graph: bool = False, backend: str = "auto") -> None:
        assert (kv_layout, backend, use_cuda_graph) == ("NHD", "fa2", False)  # other kernels take no mask
        self.workspace = float_workspace_buffer
        self.made.append(self)

    def plan(
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any, num_qo_heads: int,
        num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: Any = None, custom_mask: Any = None,
        packed_custom_mask: Any = None, causal: bool = False, sm_scale: Any = None, window_left: int = -1,
        logits_soft_cap: Any = None, q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        for ints in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert ints.dtype == torch.int32 and ints.is_contiguous()
        assert len(paged_kv_indices) == paged_kv_indptr[-1] and packed_custom_mask is None
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        blocks = 2 * DeviceInfo.of(CPU).sm_count // num_kv_heads
        assert self.workspace.numel() >= num_qo_heads * blocks * 128 * (head_dim_qk + 1) * 4
        self.rows, self.pages, self.indices = qo_indptr.tolist(), paged_kv_indptr.tolist(), paged_kv_indices
        self.lens = ((paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len).tolist()
        self.mask = None
        if custom_mask is not None:
            assert custom_mask.dtype == torch.bool and not causal and window_left == -1
            bits = [0, *np.cumsum(np.diff(self.rows) * self.lens)]
            assert bits[-1] == custom_mask.numel()
            segments = [np.packbits(custom_mask[a:b].numpy(), bitorder="little") for a, b in zip(bits[:-1], bits[1:], strict=True)]
            self.mask, self.mask_at = np.concatenate(segments), [0, *np.cumsum([len(s) for s in segments])]
        self.causal, self.window, self.softcap = causal, window_left, logits_soft_cap or 0.0
        self.scale, self.dtypes = sm_scale, (q_data_type, kv_data_type)
        assert self.scale >= 2**-10  # masked logits are scaled too

    def run(self, q: Any, paged_kv_cache: Any, *, return_lse: bool = False) -> Any:
        k, v = paged_kv_cache
        assert k.stride() == v.stride() and q.shape[0] == self.rows[-1] and (q.dtype, k.dtype) == self.dtypes
        outs, lses = [], []
        for r, (first, end) in enumerate(zip(self.rows[:-1], self.rows[1:], strict=True)):
            keys, values = (listed(x, self.indices[self.pages[r] : self.pages[r + 1]], self.lens[r]) for x in (k, v))
            keys, values = (x.repeat_interleave(q.shape[1] // k.shape[2], dim=1) for x in (keys, values))
            logits = torch.einsum("thd,nhd->htn", q[first:end].float(), keys)
            if self.softcap:
                logits = torch.tanh(logits * self.scale / self.softcap)
            scale = self.softcap or self.scale
            t, n, (length, rows) = torch.arange(end - first)[:, None], torch.arange(self.lens[r]), (self.lens[r], end - first)
            sees = torch.ones(rows, length, dtype=torch.bool)
            if self.mask is not None:
                offset = t * length + n
                sees = torch.from_numpy(self.mask[self.mask_at[r] :])[offset // 8] >> (offset % 8) & 1 != 0
            if self.causal:
                sees = n + rows <= length + t
            if self.window >= 0:
                sees = sees & (n + rows + self.window >= length + t)
            out, lse = softmax(torch.where(sees, logits, MASKED) * scale, values)
            outs.append(out)
            lses.append(lse)
        return (torch.cat(outs).to(q.dtype), torch.cat(lses).float()) if return_lse else torch.cat(outs)


class LatentDouble:
    """BatchMLAPagedAttentionWrapper."""

    def __init__(self, float_workspace_buffer: Any, use_cuda_graph: bool = False, backend: str = "auto") -> None:
        assert not use_cuda_graph
        self.workspace = float_workspace_buffer

    def plan(
        self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any, num_heads: int, head_dim_ckv: int,
        head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float, q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        for ints in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            assert ints.dtype == torch.int32
        assert causal and (head_dim_ckv, head_dim_kpe) == (512, 64) and sm_scale >= 2**-10
        assert (qo_indptr.diff() > 0).all() and (kv_len_arr >= qo_indptr.diff()).all() and 128 % num_heads == 0
        assert (kv_indptr.diff() == -(-kv_len_arr // page_size)).all()
        assert self.workspace.numel() >= 2 * DeviceInfo.of(CPU).sm_count * 64 * (512 * 2 + 4)
        self.rows, self.pages, self.indices, self.lens = qo_indptr.tolist(), kv_indptr.tolist(), kv_indices, kv_len_arr.tolist()
        self.scale, self.dtypes = sm_scale, (q_data_type, kv_data_type)

    def run(self, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, *, return_lse: bool = False) -> Any:
        assert (q_nope.dtype, ckv_cache.dtype) == (q_pe.dtype, kpe_cache.dtype) == self.dtypes
        assert q_nope.shape[0] == self.rows[-1] and (q_nope.shape[-1], kpe_cache.shape[-1], ckv_cache.dim()) == (512, 64, 3)
        outs, lses = [], []
        for r, (first, end) in enumerate(zip(self.rows[:-1], self.rows[1:], strict=True)):
            pages = self.indices[self.pages[r] : self.pages[r + 1]]
            latent, rope = (listed(x, pages, self.lens[r]) for x in (ckv_cache, kpe_cache))
            logits = torch.einsum("thd,nd->htn", q_nope[first:end].float(), latent)
            logits += torch.einsum("thd,nd->htn", q_pe[first:end].float(), rope)
            rows, length = end - first, self.lens[r]
            hidden = torch.ones(rows, length, dtype=torch.bool).triu(length - rows + 1)
            out, lse = softmax(logits.masked_fill(hidden, MASKED) * self.scale, latent[:, None].expand(-1, q_nope.shape[1], -1))
            outs.append(out)
            lses.append(lse)
        return (torch.cat(outs).to(q_nope.dtype), torch.cat(lses).float()) if return_lse else torch.cat(outs)


def attend(latent: bool) -> Attend:
    if latent:
        return Latent(LatentDouble)
    return Paged(lambda workspace: PagedDouble(workspace, backend="fa2"))


def doubled(attends: dict[bool, Attend] | None = None) -> FlashInfer:
    """The implementation on this CPU, with doubles."""
    real = registry.get("flashinfer")
    assert isinstance(real, FlashInfer)
    kept = attends or {latent: attend(latent) for latent in (False, True)}
    capability = replace(real.capability, devices=frozenset({"cpu"}), dtypes=None, kv_dtypes=None)
    return replace(real, capability=capability, find=lambda latent, device: Found(kept[latent]))


LATENT: dict[str, Any] = {"heads": 4, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "latent": True}
SHORT: dict[str, Any] = {"query_lens": (4, 4, 0, 6, 3), "prefix_lens": (-3, -4, 2, -2, 9)}
MORE = [
    Case("mla short", dtype="fp32", lse=True, padded=2, **LATENT, **SHORT),
    Case("mla strided", dtype="fp16", lse=True, strided=True, int64=True, page_size=64, **LATENT),
    Case("mla page 1", dtype="fp32", page_size=1, query_lens=(2, 7), prefix_lens=(70, 3), **LATENT),
    Case("mla overlong", dtype="fp32", query_lens=(3, 2), prefix_lens=(45, 10), overlong=True, padded=1, **LATENT),
    Case("mla places", dtype="fp32", positions=True, kv_start=True, **LATENT),
    Case("window short", dtype="fp32", window=1, lse=True, **SHORT),
    Case("window short tree", dtype="fp32", window=2, lse=True, mask="qlen", positions=True, kv_start=True, **SHORT),
    Case("window softcap", dtype="fp32", window=7, softcap=2.0, kv_start=True, page_size=4),
    Case("window wide", dtype="fp32", window=1 << 40),
    Case("full short", dtype="fp32", mask="full", kv_start=True, slack=3, padded=2, lse=True, **SHORT),
    Case("tree odd", dtype="fp16", mask="packed", query_lens=(3, 5, 0, 1, 7), prefix_lens=(10, 0, 3, 4, 29), page_size=4, lse=True),
    Case("tree softcap", dtype="fp32", mask="qlen", softcap=1.5, query_lens=(5, 3), prefix_lens=(20, 9)),
    Case("no key", dtype="fp32", query_lens=(2, 3), prefix_lens=(-2, -3), lse=True),
    Case("no key tree", dtype="fp32", query_lens=(2, 3), prefix_lens=(-2, -3), mask="qlen", lse=True),
    Case("no row", dtype="fp32", query_lens=(0, 0), prefix_lens=(0, 5), padded=1, lse=True),
]


def accepted(case: Case) -> bool:
    return not doubled().why_not(VerifyRequest.of(**build(case)), DeviceInfo.of(CPU))


GRID = [case for case in (*cases("cpu"), *MORE) if accepted(case)]


@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(case: Case) -> None:
    assert_conforms(doubled(), case)


def test_the_grid_is_worth_running() -> None:
    assert set(MORE) <= set(GRID) and len(GRID) > 90, len(GRID)
    assert {case.mask for case in GRID} == {None, "full", "qlen", "packed"} and any(case.latent for case in GRID)


@pytest.mark.parametrize("shape", [{}, LATENT], ids=["gqa", "mla"])
def test_repeated_and_reordered(shape: dict[str, Any]) -> None:
    case = Case("order", query_lens=(2, 3, 1, 0), prefix_lens=(40, 0, 65, 5), mask=None if shape else "packed", lse=True, **shape)
    for check in (check_repeat, check_order):
        result = check(doubled(), case)
        assert result.outcome == "ok", result


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-5, -1e-5])
@pytest.mark.parametrize("shape", [{}, {"mask": "packed"}, LATENT], ids=["chain", "tree", "mla"])
def test_a_scale_that_the_library_cannot_have(scale: float, shape: dict[str, Any]) -> None:
    assert_conforms(doubled(), Case("scale", query_lens=(5, 3), prefix_lens=(20, 9), scale=scale, lse=True, **shape))


@pytest.mark.parametrize("mask", [None, "qlen"])
def test_k_and_v_with_strides_of_their_own(mask: str | None) -> None:
    """FlashInfer has one set of strides for both: the listed pages are copied."""
    arguments = build(Case("strides", query_lens=(3, 2), prefix_lens=(37, 9), mask=mask))
    kv = arguments["kv"]
    wide = torch.full((*kv.v.shape[:-1], 80), float("nan"))
    wide[..., :64] = kv.v
    calls = [resolve(**{**arguments, "kv": x, "out": torch.zeros_like(arguments["out"])}) for x in (
        kv, PagedKV(kv.k, wide[..., :64], kv.block_table, kv.kv_lens),
    )]  # fmt: skip
    for call in calls:
        doubled().run(call)
    assert torch.equal(calls[0].out, calls[1].out) and calls[0].out[:5].any(-1).all()


def test_a_chain_whose_positions_are_not_its_places() -> None:
    """FlashInfer's own window goes by places."""
    arguments = build(Case("places", window=9, positions=True, lse=True))
    arguments["positions"] = arguments["positions"] // 2 + 3
    calls = [resolve(**{**arguments, "out": torch.zeros_like(arguments["out"])}) for _ in range(2)]
    doubled().run(calls[0])
    registry.get("reference").run(calls[1])
    for mine, wanted in ((calls[0].out, calls[1].out), (calls[0].lse, calls[1].lse)):
        assert mine is not None and wanted is not None
        torch.testing.assert_close(mine[:9], wanted[:9])


def test_more_query_tokens_than_the_call_said() -> None:
    with pytest.raises(ValueError, match="request 1 has 5 query tokens, more than max_query_len 3"):
        doubled().run(resolve(**{**build(Case("more")), "max_query_len": 3}))


def test_one_wrapper_a_stream_is_kept_until_more_room_is_needed() -> None:
    implementation = doubled()
    PagedDouble.made.clear()
    for heads in (4, 4, 2, 8, 4):
        implementation.run(resolve(**build(Case("kept", heads=heads))))
    sizes = [double.workspace.numel() for double in PagedDouble.made]
    assert len(sizes) == 2 and sizes[0] < sizes[1]


# -- what is declined -----------------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[VerifyRequest, DeviceInfo, list[str]]] = {
    "device": (GQA, DeviceInfo("cpu", "cpu"), ["device"]),
    "older": (GQA, replace(H200, capability=(7, 5)), ["capability"]),
    "captured": (GQA, replace(H200, capturing=True), ["capturing", "library"]),
    "no GPU here": (MLA, DeviceInfo.known("sm100"), ["library"]),
    "fp32": (replace(GQA, dtype="fp32", kv_dtype="fp32"), H200, ["dtype", "kv_dtype", "library"]),
    "fp8": (replace(GQA, kv_dtype="fp8_e4m3", scales="host"), H200, ["kv_dtype", "feature.fp8", "feature.scales", "library"]),
    "slots": (replace(GQA, kv_layout="slots", page_size=1, max_kv_len=None), H200, ["feature.slots", "library"]),
    "draft_kv": (replace(GQA, draft="dense"), H200, ["feature.draft_kv", "library"]),
    "draft_slots": (replace(GQA, draft="slots", sinks=True), H200, ["feature.draft_slots", "feature.sinks", "library"]),
    "head dimension": (replace(GQA, head_dim=96, v_head_dim=96), H200, ["head_dim", "library"]),
    "head dimensions": (replace(GQA, head_dim=192), H200, ["head_dim", "library"]),
    "latent": (replace(MLA, head_dim=288, v_head_dim=256), H200, ["head_dim", "library"]),
    "latent tree": (replace(MLA, mask="packed"), H200, ["feature.tree", "library"]),
    "latent features": (replace(MLA, window=4, softcap=True), H200, ["feature.window", "feature.softcap", "library"]),
    "heads": (replace(MLA, heads=24), H200, ["heads", "library"]),
    "batch": (replace(MLA, heads=128, num_requests=1024, max_query_len=8), H200, ["batch", "library"]),
    "mask size": (replace(GQA, mask="full", num_requests=1024, max_kv_len=1 << 20), H200, ["mask_size", "library"]),
    "window size": (replace(GQA, window=8, num_requests=1024, max_kv_len=1 << 20), H200, ["mask_size", "library"]),
    "alignment": (replace(GQA, aligned=False), H200, ["alignment", "library"]),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_declined(way: str) -> None:
    request, device, codes = WAYS[way]
    reasons = registry.get("flashinfer").why_not(request, device)
    assert [reason.code for reason in reasons] == codes
    assert all(reason.text for reason in reasons)


def test_served_once_it_is_found() -> None:
    real = registry.get("flashinfer")
    assert isinstance(real, FlashInfer)
    found = replace(real, find=lambda latent, device: Found(attend(latent)))
    served = {"page_size": 1, "window": 9, "positions": True, "kv_start": True, "softcap": True, "return_lse": True, "int64": ("kv_lens",)}
    for arch in ("sm80", "sm90", "sm100", "sm120"):
        assert found.why_not(replace(MLA, return_lse=True, positions=True), DeviceInfo.known(arch)) == ()
        for head_dim in (64, 128, 256):
            assert found.why_not(replace(GQA, head_dim=head_dim, v_head_dim=head_dim, mask="full", **served), DeviceInfo.known(arch)) == ()


def test_it_runs_when_it_is_named_alone() -> None:
    assert "flashinfer" in registry.names() and "flashinfer" not in dispatch.preference(GQA, H200)


def test_asking_imports_nothing() -> None:
    code = (
        "import sys; from flashmap.core import DeviceInfo, VerifyRequest, registry\n"
        "assert registry.get('flashinfer').why_not(VerifyRequest(32, 8, 128, 128), DeviceInfo.known('sm90'))\n"
        "print(*[m for m in sys.modules if m.split('.')[0] in ('triton', 'flashinfer') or m.startswith('flashmap.core.testing')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


# -- finding it -----------------------------------------------------------------------------------------------------------


class WrongBase(PagedDouble):
    def run(self, *arguments: Any, **keywords: Any) -> Any:
        out, lse = super().run(*arguments, **keywords)
        return out, lse * np.log(2)


class WrongBits(PagedDouble):
    def plan(self, **arguments: Any) -> None:
        super().plan(**arguments)
        self.mask = None if self.mask is None else np.packbits(np.unpackbits(self.mask, bitorder="little"), bitorder="big")


class WholePages(LatentDouble):
    def run(self, *arguments: Any, **keywords: Any) -> Any:
        self.lens = [-(-n // 16) * 16 for n in self.lens]
        return super().run(*arguments, **keywords)


class OldPlan(LatentDouble):
    def plan(self, qo_indptr: Any, kv_indptr: Any) -> None:  # type: ignore[override]
        raise AssertionError


class NoImage(PagedDouble):
    def run(self, *arguments: Any, **keywords: Any) -> Any:
        raise RuntimeError("no kernel image\nis available")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """installed(paged, latent): a package flashinfer with these wrappers, tried on this CPU."""
    real = flashinfer.IMPLEMENTATION
    monkeypatch.setattr(flashinfer, "IMPLEMENTATION", replace(real, capability=replace(real.capability, devices=frozenset({"cpu"}))))

    def install(paged: Any, latent: Any) -> None:
        names = {"BatchPrefillWithPagedKVCacheWrapper": paged, "BatchMLAPagedAttentionWrapper": latent}
        module = SimpleNamespace(__spec__=object(), **{name: wrapper for name, wrapper in names.items() if wrapper is not None})
        monkeypatch.setitem(sys.modules, "flashinfer", module)  # type: ignore[arg-type]

    return install


@pytest.mark.parametrize("latent", [False, True])
def test_found_where_it_gives_right_answers(installed: Any, latent: bool, caplog: pytest.LogCaptureFixture) -> None:
    installed(PagedDouble, LatentDouble)
    with caplog.at_level("INFO", logger="flashmap"):
        found = look(latent, CPU)
    assert found.attend is not None and found.reasons == () and len(caplog.records) == 1


@pytest.mark.parametrize(
    ("paged", "latent", "text"),
    [
        (WrongBase, None, "lse is off"),
        (WrongBits, None, "out is off"),
        (NoImage, None, "RuntimeError: no kernel image"),
        (None, WholePages, "nan"),
        (None, OldPlan, "TypeError: OldPlan.plan() got an unexpected keyword argument"),
        (None, None, "has no attribute 'BatchPrefillWithPagedKVCacheWrapper'"),
    ],
)  # fmt: skip
def test_not_used_where_it_errs(installed: Any, paged: Any, latent: Any, text: str) -> None:
    installed(paged, latent)
    found = look(latent is not None, CPU)
    assert found.attend is None and [reason.code for reason in found.reasons] == ["library_probe"]
    assert text in found.reasons[0].text


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer.util, "find_spec", lambda name: None)
    assert [reason.code for reason in look(False, CPU).reasons] == ["library"]


def test_each_kernel_is_looked_for_once(pretend_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    pretend_gpu((8, 6))
    monkeypatch.setattr(flashinfer, "look", lambda latent, device: looked.append(latent) or Found(attend(latent)))
    for _ in range(2):
        for request in (GQA, MLA):
            assert registry.get("flashinfer").why_not(request, DeviceInfo.known("sm86")) == ()
    assert looked == [False, True]


def test_nothing_to_prepare() -> None:
    doubled().prepare(GQA, Limits(8, 4, 8192), CPU)
