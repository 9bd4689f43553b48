"""Installing into vLLM and out of it again, in this process; no engine."""

import logging

import pytest

pytest.importorskip("vllm")

from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import flashmap.adapters.vllm as adapter
from flashmap.adapters import install
from flashmap.core import stats

OURS = adapter.CPU


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in (
        "FLASHMAP_DISABLE",
        "FLASHMAP_IMPL",
        "FLASHMAP_STRICT",
        "FLASHMAP_LOG",
        "FLASHMAP_CHECK",
        "FLASHMAP_STATS_DIR",
        "FLASHMAP_VLLM_BACKENDS",
    ):
        monkeypatch.delenv(name, raising=False)
    before = adapter._installation
    if before is not None:
        before.remove()
    yield
    if adapter._installation is not None:
        adapter._installation.remove()
    for name in OURS:
        AttentionBackendEnum[name].clear_override()


def paths():
    return {name: AttentionBackendEnum[name].get_path() for name in OURS}


def test_hooks_both_backends_and_removes_them():
    untouched = paths()
    installation = install("vllm")
    assert [str(hook) for hook in installation.hooked] == [f"vLLM backend {name} -> {path}" for name, path in OURS.items()]
    assert installation.declined == ()
    assert paths() == OURS
    installation.remove()
    assert paths() == untouched and not AttentionBackendEnum.CPU_ATTN.is_overridden()
    installation.remove()  # a second time does nothing
    assert paths() == untouched


def test_installing_again_changes_nothing():
    first = install("vllm")
    assert install("vllm") is first
    adapter.register()
    assert adapter._installation is first


def test_what_vllm_selects_follows():
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    wanted = AttentionSelectorConfig(head_size=64, dtype=torch.bfloat16, kv_cache_dtype=None, block_size=None)

    def selected():
        return current_platform.get_attn_backend_cls(AttentionBackendEnum.CPU_ATTN, wanted, 8)

    before = selected()
    installation = install("vllm")
    assert selected() == OURS["CPU_ATTN"]
    assert AttentionBackendEnum.CPU_ATTN.get_class().get_name() == "CPU_ATTN"
    assert AttentionBackendEnum.CPU_MLA.get_class().get_name() == "CPU_MLA"
    installation.remove()
    assert selected() == before


def test_one_backend_alone_and_the_processes_that_vllm_starts_hook_the_same(monkeypatch):
    import os

    installation = install("vllm", backends=["CPU_MLA"])
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    assert os.environ["FLASHMAP_VLLM_BACKENDS"] == "CPU_MLA"
    more = install("vllm", backends=["CPU_MLA", "CPU_ATTN"])
    assert paths() == OURS and set(map(str, installation.hooked)) < set(map(str, more.hooked))
    more.remove()
    assert "FLASHMAP_VLLM_BACKENDS" not in os.environ and not AttentionBackendEnum.CPU_MLA.is_overridden()
    monkeypatch.setenv("FLASHMAP_VLLM_BACKENDS", "CPU_ATTN")
    assert [str(hook).split()[2] for hook in install("vllm").hooked] == ["CPU_ATTN"]


def test_names_that_do_not_exist():
    with pytest.raises(ValueError, match=r"'tgi'.*'vllm'"):
        install("tgi")
    with pytest.raises(ValueError, match=r"'TPU_ATTN'.*CPU_ATTN, CPU_MLA, TRITON_ATTN"):
        install("vllm", backends=["TPU_ATTN"])


def test_a_broken_contract_leaves_that_backend_alone_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(cpu_attn.CPUAttentionBackendImpl, "forward_renamed", cpu_attn.CPUAttentionBackendImpl.forward, raising=False)
    monkeypatch.delattr(cpu_attn.CPUAttentionBackendImpl, "forward")
    monkeypatch.setattr(cpu_attn.CPUAttentionBackendImpl.__mro__[1], "forward", None, raising=False)
    untouched = paths()
    with caplog.at_level(logging.INFO, logger="flashmap"):
        installation = install("vllm")
        install("vllm")
    (reason,) = installation.declined
    assert reason.code == "contract" and "CPUAttentionBackendImpl.forward" in reason.text
    assert paths()["CPU_ATTN"] == untouched["CPU_ATTN"] and paths()["CPU_MLA"] == OURS["CPU_MLA"]
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "CPUAttentionBackendImpl.forward" in warnings[0].getMessage()


def test_a_broken_contract_under_strict_is_an_error_and_nothing_is_hooked(monkeypatch):
    monkeypatch.setenv("FLASHMAP_STRICT", "1")
    monkeypatch.delattr(cpu_attn, "CPUAttentionMetadata")
    untouched = paths()
    with pytest.raises(RuntimeError, match="CPUAttentionMetadata is missing"):
        adapter.register()
    assert paths() == untouched


@pytest.mark.parametrize("name, value, accepted", [("FLASHMAP_IMPL", "torch_dens", "torch_dense"), ("FLASHMAP_CHECK", "perhaps", "true")])
def test_a_bad_variable_never_stops_the_engine(monkeypatch, caplog, name, value, accepted):
    monkeypatch.setenv(name, value)
    untouched = paths()
    with caplog.at_level(logging.WARNING, logger="flashmap"):
        adapter.register()
    assert paths() == untouched
    assert f"{name}={value!r}" in caplog.text and accepted in caplog.text


def test_disabled(monkeypatch, caplog):
    monkeypatch.setenv("FLASHMAP_DISABLE", "1")
    with caplog.at_level(logging.INFO, logger="flashmap"):
        adapter.register()
        installation = install("vllm")
    assert installation.hooked == () and [r.code for r in installation.declined] == ["disabled"]
    assert caplog.records == []


def test_another_plugins_override_stays(caplog):
    register_backend(AttentionBackendEnum.CPU_ATTN, "somebody.elses.Backend")
    installation = install("vllm")
    assert [r.code for r in installation.declined] == ["overridden"]
    installation.remove()
    assert AttentionBackendEnum.CPU_ATTN.get_path() == "somebody.elses.Backend"


def test_an_override_made_after_ours_is_not_taken_away():
    installation = install("vllm")
    register_backend(AttentionBackendEnum.CPU_ATTN, "somebody.elses.Backend")
    installation.remove()
    assert AttentionBackendEnum.CPU_ATTN.get_path() == "somebody.elses.Backend"
    assert not AttentionBackendEnum.CPU_MLA.is_overridden()


def test_installing_counts_nothing():
    stats.reset()
    install("vllm")
    assert stats.snapshot() == {}


def test_our_lines_wait_for_vllms_handlers(monkeypatch):
    """vLLM sets its logger up after it loads plugins."""
    ours, vllms = logging.getLogger("flashmap"), logging.getLogger("vllm")
    shown: list[str] = []

    class Shown(logging.Handler):
        def emit(self, record):
            shown.append(record.getMessage())

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "propagate", False)
    monkeypatch.setattr(vllms, "handlers", [])
    install("vllm")
    vllms.handlers.append(Shown())
    logging.getLogger("flashmap.core").info("second")
    assert len(shown) == 2 and shown[0].startswith("flashmap is active in vLLM") and shown[1] == "second"
