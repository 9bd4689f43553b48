"""Choosing: pure, explained by reason codes, strict where a name was asked for, logged once, counted."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from mean_case import mean_case, near, rows

from flashmap.core import (
    Capability,
    Declined,
    DeviceInfo,
    Implementation,
    Reason,
    VerifyRequest,
    dispatch,
    registry,
    stats,
    verify_attention,
)
from flashmap.core.dispatch import Decision, Policy, choose
from flashmap.core.op import on_device

REQUEST = VerifyRequest(heads=32, kv_heads=8, head_dim=128, v_head_dim=128, max_query_len=17)
H200 = replace(DeviceInfo.known("sm90"), triton="3.6.0")
CPU = DeviceInfo("cpu", "cpu", triton="3.6.0")


def codes(reasons: tuple[Reason, ...]) -> list[str]:
    return [reason.code for reason in reasons]


# -- one test for each code -----------------------------------------------------------------------------------------------

NARROW = Capability(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({"bf16"}),
    kv_dtypes=frozenset({"bf16"}),
    head_dims=frozenset({128}),
    max_query_len=17,
    min_capability=(9, 0),
    features=frozenset({"tree"}),
)
CAPABILITY_CODES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "device": ({}, {"type": "cpu"}, "'cpu'"),
    "dtype": ({"dtype": "fp16"}, {}, "fp16"),
    "kv_dtype": ({"kv_dtype": "fp32"}, {}, "fp32"),
    "head_dim": ({"head_dim": 96}, {}, "96"),
    "query_len": ({"max_query_len": 18}, {}, "18"),
    "capability": ({}, {"capability": (8, 9)}, "8.9"),
    "capturing": ({}, {"capturing": True}, "capture"),
    "feature.slots": ({"kv_layout": "slots"}, {}, "slots"),
    "feature.latent": ({"latent": True}, {}, "latent"),
    "feature.draft_kv": ({"draft": "dense"}, {}, "draft_kv"),
    "feature.draft_slots": ({"draft": "slots"}, {}, "draft_slots"),
    "feature.window": ({"window": 4096}, {}, "window"),
    "feature.positions": ({"positions": True}, {}, "positions"),
    "feature.kv_start": ({"kv_start": True}, {}, "kv_start"),
    "feature.sinks": ({"sinks": True}, {}, "sinks"),
    "feature.softcap": ({"softcap": True}, {}, "softcap"),
    "feature.lse": ({"return_lse": True}, {}, "lse"),
    "feature.scales": ({"scales": "device"}, {}, "scales"),
}


@pytest.mark.parametrize("code", CAPABILITY_CODES)
def test_capability_reasons(code: str) -> None:
    request, device, value = CAPABILITY_CODES[code]
    assert NARROW.why_not(replace(REQUEST, mask="full"), H200) == ()
    (reason,) = NARROW.why_not(replace(REQUEST, **request), replace(H200, **device))
    assert reason.code == code and value in reason.text


def test_fp8_is_a_kv_dtype_and_a_feature() -> None:
    assert codes(NARROW.why_not(replace(REQUEST, kv_dtype="fp8_e4m3"), H200)) == ["kv_dtype", "feature.fp8"]


def test_all_reasons_are_given() -> None:
    request = replace(REQUEST, dtype="fp32", head_dim=80, sinks=True, max_query_len=64)
    assert codes(NARROW.why_not(request, CPU)) == ["device", "dtype", "head_dim", "query_len", "feature.sinks"]


TRITON_CODES: dict[str, tuple[dict[str, Any], DeviceInfo]] = {
    "device": ({}, CPU),
    "capability": ({}, replace(H200, capability=(7, 5))),
    "no_triton": ({}, replace(H200, triton=None)),
    "interpreter_bf16": ({}, replace(CPU, interpreted=True)),
    "fp8_capability": ({"kv_dtype": "fp8_e4m3"}, replace(DeviceInfo.known("sm80"), triton="3.6.0")),
    "shared_memory": ({"head_dim": 4096, "v_head_dim": 4096, "dtype": "fp32", "kv_dtype": "fp32"}, H200),
}


@pytest.mark.parametrize("code", TRITON_CODES)
def test_triton_reasons(code: str) -> None:
    changes, device = TRITON_CODES[code]
    assert codes(registry.get("triton_splitkv").why_not(replace(REQUEST, **changes), device)) == [code]


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm90", "sm100", "sm120"])
def test_triton_serves_the_common_shapes_everywhere(arch: str) -> None:
    device = replace(DeviceInfo.known(arch), triton="3.6.0")
    for head_dim in (64, 80, 96, 128, 256):
        for dtype in ("fp16", "bf16"):
            request = replace(REQUEST, head_dim=head_dim, v_head_dim=head_dim, dtype=dtype, kv_dtype=dtype)
            assert choose(request, device, Policy()).winner == "triton_splitkv"


def test_what_reads_the_host_declines_under_capture() -> None:
    for name in ("reference", "torch_dense"):
        assert codes(registry.get(name).why_not(REQUEST, replace(H200, capturing=True))) == ["capturing"]
        assert registry.get(name).why_not(REQUEST, H200) == () == registry.get(name).why_not(REQUEST, CPU)


# -- choose ---------------------------------------------------------------------------------------------------------------


def test_choose_is_pure() -> None:
    """Facts in, facts out: the same answer each time, nothing counted, logged or imported for it; its values are hashable."""
    asked: list[str] = []

    def get(name: str) -> Any:
        asked.append(name)
        return Implementation(name)

    first = choose(REQUEST, H200, Policy(), get=get)
    assert first == choose(REQUEST, H200, Policy(), get=get) == Decision("triton_splitkv", (), ("torch_dense",))
    assert asked == ["triton_splitkv", "torch_dense"] * 2
    assert len({REQUEST, replace(REQUEST), H200, replace(H200), Policy(), Policy(), first}) == 4
    assert stats.snapshot() == {}


def test_automatic_choice() -> None:
    assert choose(REQUEST, CPU, Policy()) == Decision("torch_dense")
    assert choose(REQUEST, H200, Policy()) == Decision("triton_splitkv", (), ("torch_dense",))
    old = choose(REQUEST, replace(H200, capability=(7, 0)), Policy())
    assert old.winner == "torch_dense" and codes(old.reasons) == ["capability"]
    none = choose(REQUEST, replace(H200, capability=(7, 0), capturing=True), Policy())
    assert none.winner is None and [name for name, _ in none.declined] == ["triton_splitkv", "torch_dense"]
    assert codes(none.reasons) == ["capability", "capturing"]


def test_a_named_implementation_or_nothing() -> None:
    assert choose(REQUEST, H200, Policy(impl="reference")) == Decision("reference")
    decision = choose(REQUEST, CPU, Policy(impl="triton_splitkv"))
    assert decision.winner is None and decision.passed == () and codes(decision.reasons) == ["device"]
    with pytest.raises(ValueError, match="'tritton': registered are reference, torch_dense, triton_splitkv"):
        choose(REQUEST, CPU, Policy(impl="tritton"))


def test_engine_faster() -> None:
    decision = choose(REQUEST, CPU, Policy(engine_kernel="vllm.CPU_ATTN"))
    ((name, reasons),) = decision.declined
    assert decision.winner is None and name == dispatch.ENGINE and codes(reasons) == ["engine_faster"]
    assert "vllm.CPU_ATTN" in reasons[0].text and "FLASHMAP_IMPL" in str(reasons[0])
    assert choose(REQUEST, CPU, Policy(impl="torch_dense", engine_kernel="vllm.CPU_ATTN")).winner == "torch_dense"


def test_fast_path_lost() -> None:
    """On a GPU torch_dense stands in for a kernel, but not under FLASHMAP_STRICT and not for an engine's own kernel."""
    old = replace(H200, capability=(7, 0))
    for policy, why in ((Policy(strict=True), "FLASHMAP_STRICT"), (Policy(engine_kernel="vllm.FLASH_ATTN"), "vllm.FLASH_ATTN")):
        decision = choose(REQUEST, old, policy)
        assert decision.winner is None and codes(decision.reasons) == ["capability", "fast_path_lost"]
        assert why in decision.reasons[-1].text
    assert choose(REQUEST, CPU, Policy(strict=True)).winner == "torch_dense", "where there is no GPU nothing is lost"
    assert choose(REQUEST, old, Policy(impl="torch_dense", strict=True)).winner == "torch_dense", "asked for by name"


# -- select, through the op -----------------------------------------------------------------------------------------------


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[DeviceInfo], None]:
    """Tensors stay on the CPU; choosing is told of another device."""

    def set_device(info: DeviceInfo) -> None:
        monkeypatch.setattr(DeviceInfo, "of", classmethod(lambda cls, device: info))

    return set_device


def test_the_choice_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="flashmap"):
        for prefix in (1, 2, 3):
            assert rows(verify_attention(**mean_case([[1] * prefix], [[1]]))) == near([1])
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "GQA 1/1 heads d32, fp32, slots fp32 cache, chain of 1 on cpu -> torch_dense" in record.getMessage()
    assert stats.snapshot() == {("torch_dense", "run", ""): 3}


def test_on_a_gpu_what_no_kernel_takes_goes_to_torch_dense_with_one_warning(
    pretend: Callable[[DeviceInfo], None], caplog: pytest.LogCaptureFixture
) -> None:
    pretend(replace(H200, name="old card", capability=(7, 0)))
    with caplog.at_level(logging.INFO, logger="flashmap"):
        for _ in range(3):
            assert rows(verify_attention(**mean_case([[1]], [[3]]))) == near([2])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "old card -> torch_dense" in record.getMessage() and "compute capability 7.0 is less than 8.0" in record.getMessage()
    assert stats.snapshot() == {("torch_dense", "run", ""): 3, ("triton_splitkv", "declined", "capability"): 3}


def test_strict_makes_the_loss_an_error(pretend: Callable[[DeviceInfo], None], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(replace(H200, capability=(7, 0)))
    monkeypatch.setenv("FLASHMAP_STRICT", "1")
    arguments = mean_case([[1]], [[3]])
    arguments["out"] = torch.full_like(arguments["q"], 77)
    with pytest.raises(Declined) as declined:
        verify_attention(**arguments)
    assert codes(declined.value.reasons) == ["capability", "fast_path_lost"]
    assert rows(arguments["out"]) == [77]
    assert stats.snapshot() == {("triton_splitkv", "declined", "capability"): 1, ("torch_dense", "declined", "fast_path_lost"): 1}


def test_a_named_implementation_that_cannot_run_is_declined(pretend: Callable[[DeviceInfo], None]) -> None:
    pretend(CPU)
    arguments = mean_case([[1]], [[3]])
    arguments["out"] = torch.full_like(arguments["q"], 77)
    with pytest.raises(Declined, match="triton_splitkv cannot serve this call: runs on cuda, not on 'cpu'") as declined:
        verify_attention(**arguments, impl="triton_splitkv")
    assert codes(declined.value.reasons) == ["device"] and isinstance(declined.value, RuntimeError)
    assert rows(arguments["out"]) == [77]
    assert stats.snapshot() == {("triton_splitkv", "declined", "device"): 1}


@pytest.fixture
def unready() -> Iterator[None]:
    class Unready(Implementation):
        def not_ready(self, call: Any) -> tuple[Reason, ...]:
            return (Reason("scratch", "no scratch", "call prepare()"),)

        def run(self, call: Any) -> None:
            call.out.fill_(7)

    registry.register(Unready("unready", Capability(capturable=True)))
    yield
    registry.unregister("unready")


def test_what_a_capture_lacks_is_declined_before_any_launch(pretend: Callable[[DeviceInfo], None], unready: None) -> None:
    arguments = mean_case([[1]], [[3]])
    assert rows(verify_attention(**arguments, impl="unready")) == [7], "outside capture it may allocate"
    pretend(replace(H200, capturing=True))
    arguments["out"] = torch.full_like(arguments["q"], 77)
    with pytest.raises(Declined) as declined:
        verify_attention(**arguments, impl="unready")
    assert codes(declined.value.reasons) == ["scratch"] and rows(arguments["out"]) == [77]


def test_declined_survives_the_way_to_another_process() -> None:
    declined = pickle.loads(pickle.dumps(Declined("narrow", (Reason("dtype", "dtype fp16 is not one of bf16", "use bf16"),))))
    assert (declined.name, codes(declined.reasons)) == ("narrow", ["dtype"]) and "use bf16" in str(declined)


def test_a_replaced_implementation_is_asked_again() -> None:
    arguments = mean_case([[1]], [[3]])
    verify_attention(**arguments)
    registry.register(Implementation("torch_dense", Capability(devices=frozenset({"cuda"}))), replace=True)
    try:
        with pytest.raises(Declined, match="runs on cuda, not on 'cpu'"):
            verify_attention(**arguments)
    finally:
        registry.unregister("torch_dense")
    assert rows(verify_attention(**arguments)) == near([2])


def test_flashmap_impl(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = mean_case([[1]], [[3]])
    monkeypatch.setenv("FLASHMAP_IMPL", "reference")
    verify_attention(**arguments)
    verify_attention(**arguments, impl="torch_dense")  # the call's own word counts for more
    assert stats.snapshot() == {("reference", "run", ""): 1, ("torch_dense", "run", ""): 1}
    monkeypatch.setenv("FLASHMAP_IMPL", "tritton")
    with pytest.raises(ValueError, match="FLASHMAP_IMPL='tritton' names no implementation: set it to one of reference, torch_dense"):
        verify_attention(**arguments)
    monkeypatch.setenv("FLASHMAP_IMPL", "")
    assert Policy.from_env() == Policy()


def test_a_bad_flashmap_strict_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMAP_STRICT", "maybe")
    with pytest.raises(ValueError, match="FLASHMAP_STRICT='maybe'"):
        verify_attention(**mean_case([[1]], [[3]]))


def test_a_kernels_exception_is_not_caught_to_try_another(pretend: Callable[[DeviceInfo], None], monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Implementation):
        def run(self, call: Any) -> None:
            raise RuntimeError("illegal memory access")

    pretend(H200)
    registry.register(Fails("triton_splitkv"), replace=True)
    try:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            verify_attention(**mean_case([[1]], [[3]]))
    finally:
        registry.unregister("triton_splitkv")
    assert stats.snapshot() == {}


# -- devices --------------------------------------------------------------------------------------------------------------


def test_known_devices() -> None:
    assert (H200.type, H200.capability, H200.sm_count) == ("cuda", (9, 0), 132)
    assert DeviceInfo.known("sm80", capturing=True).capturing
    with pytest.raises(ValueError, match="'sm42' is not known: use one of sm80,"):
        DeviceInfo.known("sm42")


def test_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for interpreted in (True, False):
        monkeypatch.setenv("TRITON_INTERPRET", str(int(interpreted)))
        info = DeviceInfo.of(torch.device("cpu"))
        assert (info.type, info.capability, info.capturing, info.interpreted) == ("cpu", (0, 0), False, interpreted)


def test_the_device_of_q_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert getattr(on_device(torch.device("cuda", 1)), "idx", None) == 1
    for device in (torch.device("cuda", 0), torch.device("cuda"), torch.device("cpu")):
        assert not isinstance(on_device(device), torch.cuda.device)
