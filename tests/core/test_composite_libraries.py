"""How FlashAttention 3 and FlashMLA are found: from which source, with which parameters, tried on a known answer, once a process.

On a CPU, with the doubles of composite_doubles.py as operators of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from composite_doubles import doubled, fa3_double, flashmla_double
from torch import library

from flashmap.core import DeviceInfo
from flashmap.core.implementations.composite import libraries
from flashmap.core.implementations.composite.libraries import check_fa3, check_flashmla, search
from flashmap.core.implementations.probing import Found
from flashmap.core.inputs import resolve
from flashmap.core.testing import Case, build

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the libraries themselves")
H200 = DeviceInfo.known("sm90")

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
    defined = vars(library)["Library"]("flashmap_test", "FRAGMENT")

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


def test_looked_for_once_and_never_under_capture(pretend_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    pretend_gpu(libraries.HOPPER)
    monkeypatch.setattr(libraries, "search", lambda *arguments: looked.append(arguments) or Found(fa3_double))
    assert [reason.code for reason in libraries.fa3(replace(H200, capturing=True)).reasons] == ["not_probed"] and not looked
    assert libraries.fa3(H200).attend is fa3_double
    assert libraries.fa3(replace(H200, capturing=True)).attend is fa3_double and len(looked) == 1
    pretend_gpu((8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert [reason.code for reason in libraries.fa3(H200).reasons] == ["library"] and len(looked) == 1
